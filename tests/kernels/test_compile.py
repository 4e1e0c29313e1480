"""Machine code for GPUs that are not there: needs the dependency group `compile`."""

import collections
import itertools
import math
import re

import pytest
from gpu_compiler import OLD_TARGETS, TARGETS, needs_compiler, output_of
from helpers import mostly_nightly

from pallas_kernels._mosaic_gpu.config import MOSAIC_SYRKX_CONFIGS

TRITON = """
# Of every default config of single matrices.
half = (64, 100, 256, 1024, 3072, 4096)
for dtype, sizes in ((jnp.bfloat16, half), (jnp.float16, (100, 1024)), (jnp.float32, (100,))):
    for n in sizes:
        text = compiled(
            lambda a, c: syrk(a, c, beta=1.0, diagonal=2.0, implementation="triton"),
            (n, n), (n, n), dtype=dtype,
        )
        assert text.count('"__gpu$xla.gpu.triton"') == 1

iteration = functools.partial(newton_schulz, implementation="triton")
text = compiled(iteration, (4096, 2048), dtype=jnp.float32)
assert text.count('"__gpu$xla.gpu.triton"') == 15, text.count('"__gpu$xla.gpu.triton"')

# Of every default config.
for n, dtype in itertools.product((100, 512, 700, 2048), (jnp.bfloat16, jnp.float16, jnp.float32)):
    gemm = functools.partial(triton_gemm, out_dtype=dtype)
    text = compiled(gemm, (n, n), (n, n), dtype=dtype)
    assert text.count('"__gpu$xla.gpu.triton"') == 1
print("compiled")
"""

MOSAIC_GPU = """
def kernel(config, has_b, residual, a, *others):
    b, cs = (others[0], others[1:]) if has_b else (None, others)
    coefficients = tuple(map(jnp.float32, (0.5, 2.0, 3.0, 4.0)))[:2 + len(cs)]
    return mosaic_gpu_syrkx(
        a, b, cs, coefficients, symmetrize_output=True, residual=residual, config=config
    )

has_b, num_cs, residual = {has_b}, {num_cs}, {residual}
for config in MOSAIC_SYRKX_CONFIGS:
    if config.block_n == 64 or not has_b:
        print(config.name, flush=True)
        function = functools.partial(kernel, config, has_b, residual)
        compiled(function, *[(2048, 2048)] * (1 + has_b + num_cs))
"""

GEMM = """
for config in MOSAIC_GEMM_CONFIGS:
    for out_dtype in (None, jnp.dtype("float32")):
        print("gemm", config.tile_n, flush=True)
        function = lambda a, b: mosaic_gpu_gemm(a, b, out_dtype=out_dtype, config=config)
        compiled(function, (2048, 2048), (2048, 2048))
"""

TCGEN05 = """
from pallas_kernels._mosaic_gpu import tcgen05

def kernel(has_b, residual, a, *others):
    b, cs = (others[0], others[1:]) if has_b else (None, others)
    coefficients = tuple(np.float32((0.5, 2.0, 3.0, 4.0)))[:2 + len(cs)]
    return tcgen05.syrkx(
        a, b, cs, coefficients, symmetrize_output=True, residual=residual, num_programs=148
    )

jax.config.update("jax_default_device", mesh.devices.item())  # Pallas asks it for its capability
for has_b, num_cs, residual in ((False, 0, False), (True, 2, False), (False, 2, True)):
    function = functools.partial(kernel, has_b, residual)
    compiled(function, *[(2048, 2048)] * (1 + has_b + num_cs))
for out_dtype in (None, jnp.dtype("float32")):
    function = functools.partial(tcgen05.gemm, out_dtype=out_dtype, num_programs=148)
    compiled(function, (2048, 2048), (2048, 2048))
"""

NEWTON_SCHULZ = """
iteration = functools.partial(newton_schulz, **{{"implementation": "mosaic_gpu"}} | {kwargs})
print(compiled(iteration, {shape}))
"""

KEPT = """
from jax.experimental.custom_partitioning import custom_partitioning
from pallas_kernels import _lowered

def fail(*_, **__):
    raise AssertionError("a kernel is lowered again")

multiply = lambda a, b: mosaic_gpu_gemm(a, b)
print(compiled(multiply, (2, 64, 64), (2, 64, 64)))
_lowered._lower_anew = fail
mesh = mesh_of(1, 2)
partitioned = custom_partitioning(multiply)
partitioned.def_partition(
    partition=lambda mesh, operands, result: (
        mesh, multiply, operands[0].sharding, (operands[0].sharding,) * 2
    ),
    sharding_rule="i j k, i k l -> i j l",
)
operands = [
    jax.ShapeDtypeStruct(
        (4, 64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
] * 2
with jax.set_mesh(mesh):
    print(jax.jit(partitioned).lower(*operands).compile().as_text())
"""

UPDATE = """
mesh = mesh_of({hosts}, 8)
rows = NamedSharding(mesh, PartitionSpec(None, "x"))
gradients = [jax.ShapeDtypeStruct(({hosts}, 512, 1024), jnp.float32, sharding=rows)] * 40
optimizer = scale_by_muon(
    NewtonSchulz(implementation="mosaic_gpu", max_group_bytes=2 * 2**20),
    weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
    shardings={shardings},
)
with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, gradients)._replace(mu=gradients)
    compiled = jax.jit(optimizer.update).lower(gradients, state).compile()
    print(compiled.memory_analysis().temp_size_in_bytes)
    print(compiled.as_text())
"""

GROUPED = """
sharding = NamedSharding(mesh, PartitionSpec())
gradients = [
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    for shape in [(512, 1024), (1024, 512)] * 12
]
optimizer = scale_by_muon(NewtonSchulz(implementation="mosaic_gpu", max_group_bytes=16 * 2**20))
with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, gradients)._replace(mu=gradients)
    compiled = jax.jit(optimizer.update).lower(gradients, state).compile()
    print(compiled.memory_analysis().temp_size_in_bytes)
    print(compiled.as_text())
"""

STORED = """
from muon_jax import muon

def print_temporaries(devices, views, shape):
    mesh = Mesh(mesh_of(1, devices).devices, ("x",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows) for name in views}
    for mu_dtype in ("float32", "int8"):
        optimizer = muon(
            0.1,
            mu_dtype=mu_dtype,
            muon_weight_dimension_numbers=views,
            ns_steps=1,
            shardings=rows.spec,
        )
        with jax.set_mesh(mesh):
            state = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=rows if x.ndim else whole
                ),
                jax.eval_shape(optimizer.init, params),
            )
            update = jax.jit(optimizer.update, donate_argnums=(0, 1))
            compiled = update.lower(params, state, params).compile()
            print(compiled.memory_analysis().temp_size_in_bytes)

print_temporaries(1, {"a": MuonDimensionNumbers(), "b": None}, (1024, 4096))
print_temporaries(4, dict.fromkeys("abcdef", MuonDimensionNumbers()), (2048, 2048))
"""

IN_PIECES = """
mesh = mesh_of(1, 8)
columns = NamedSharding(mesh, PartitionSpec(None, None, "x"))
gradients = jax.ShapeDtypeStruct(({count}, 512, 4096), jnp.float32, sharding=columns)
optimizer = scale_by_muon(
    NewtonSchulz(implementation="mosaic_gpu"),
    weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
    shardings=Exchange("gram_or_exchange"),
)
with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, gradients)._replace(mu=gradients)
    print(jax.jit(optimizer.update).lower(gradients, state).compile().as_text())
"""

INSTRUCTION = re.compile(r"^ +(?:ROOT )?%\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", re.MULTILINE)


MMA = """
from pallas_kernels import gemm

# Pallas asks the default device for its compute capability.
jax.config.update("jax_default_device", mesh.devices.flat[0])
for batch in (1, 16):  # of narrow tiles, and of wide ones
    square = (batch, 2048, 2048)
    compiled(lambda a: syrk(a, implementation="mosaic_gpu_mma"), square)
    compiled(lambda a, c: syrk(a, c, beta=0.5, implementation="mosaic_gpu_mma"), square, square)
    compiled(lambda a, b: gemm(a, b, implementation="mosaic_gpu_mma"), square, square)
"""

pytestmark = pytest.mark.slow


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_triton_s_kernel_and_the_iteration_compile_to_machine_code(name):
    assert output_of(TRITON, name).strip() == "compiled"


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("name", OLD_TARGETS)
def test_on_older_gpus_all_products_are_cublas_s(name):
    kwargs = {"ns_coeffs": "balanced", "implementation": None}
    text = output_of(NEWTON_SCHULZ.format(shape=(512, 1024), kwargs=kwargs), name)
    assert {*re.findall(r'custom_call_target="([^"]+)"', text)} == {"__cublas$lt$matmul"}
    assert re.search(r"f16\[512,512\].*__cublas", text)


@needs_compiler
@pytest.mark.parametrize(
    ("has_b", "num_cs", "residual"),
    [
        (False, 0, False),
        (True, 2, False),
        (False, 6, False),
        (False, 2, True),
    ],
    ids=["A", "A, B, 2 C", "A, 6 C", "A, 2 C, residual"],
)
@pytest.mark.nightly
def test_no_config_of_the_hopper_kernel_spills_registers(has_b, num_cs, residual):
    program = MOSAIC_GPU.format(has_b=has_b, num_cs=num_cs, residual=residual)
    report = output_of(program, "NVIDIA H200", MOSAIC_GPU_DUMP_PTXAS="1")
    configs = [config for config in MOSAIC_SYRKX_CONFIGS if config.block_n == 64 or not has_b]
    expected = [line for config in configs for line in (config.name, "0 bytes spill stores")]
    found = re.findall(r"^mosaic_gpu .+|\d+ bytes spill stores", report, re.MULTILINE)
    assert found == expected


@needs_compiler
@pytest.mark.nightly
def test_no_config_of_the_full_product_spills_registers():
    report = output_of(GEMM, "NVIDIA H200", MOSAIC_GPU_DUMP_PTXAS="1")
    found = re.findall(r"^gemm .+|\d+ bytes spill stores", report, re.MULTILINE)
    expected = [(f"gemm {n}", "0 bytes spill stores") for n in (128, 192, 256) for _ in "12"]
    assert found == [*itertools.chain.from_iterable(expected)]


@needs_compiler
@pytest.mark.parametrize("name", mostly_nightly(TARGETS, (), ["NVIDIA A100"]))
def test_no_kernel_by_mma_spills_registers(name):
    """For the architecture of the device itself, of which Pallas knows."""
    report = output_of(MMA, name, MOSAIC_GPU_DUMP_PTXAS="1")
    assert re.findall(r"frame, (\d+) bytes spill stores", report) == ["0"] * 6
    major, minor, *_ = TARGETS[name]
    architecture = f"sm_{major}{minor}{'a' * (major >= 9)}"
    assert {*re.findall(r"for '(sm_\w+)'", report)} == {architecture}


@needs_compiler
@pytest.mark.nightly
def test_no_kernel_by_tcgen05_spills_registers():
    report = output_of(TCGEN05, "NVIDIA B200", MOSAIC_GPU_DUMP_PTXAS="1")
    assert re.findall(r"\d+ bytes spill stores", report) == ["0 bytes spill stores"] * 5


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    mostly_nightly([(4096, 4096), (4096, 1024), (4, 1024, 2048)], (), [(4096, 1024)]),
    ids=str,
)
def test_the_iteration_on_hopper_is_its_products_and_two_passes(shape):
    """Two passes over X, which find its largest element, and scale it; a tall one is transposed.

    The first time that is part of the scaling. A wide one is scaled two elements at a time.
    """
    text = output_of(NEWTON_SCHULZ.format(shape=shape, kwargs={}), "NVIDIA H200")
    *called, entry = re.split(r"^(?=%|ENTRY )", text, flags=re.MULTILINE)
    assert not re.search(r" dot\(|\"__cublas\$", text)
    assert entry.count('custom_call_target="mosaic_gpu') == 15

    opcodes = {opcode for _, opcode in INSTRUCTION.findall(entry)}
    free = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
    assert opcodes - free <= {"fusion", "custom-call"}

    passes, size, is_tall = [], math.prod(shape), shape == (4096, 1024)
    for computation in called:
        whole = {
            opcode
            for sizes, opcode in INSTRUCTION.findall(computation)
            if math.prod(map(int, filter(None, sizes.split(",")))) in (size, size // 2)
        }
        if whole - {"parameter", "bitcast"} and "dot" not in whole:
            passes.append(whole)
    largest, *transposed, scaled = sorted(
        passes, key=lambda whole: ("multiply" in whole, "transpose" in whole)
    )
    assert "abs" in largest and "transpose" not in largest
    assert "multiply" in scaled and ("transpose" in scaled) == is_tall
    assert ("shift-right-logical" in scaled) != is_tall
    assert ["transpose" in whole for whole in transposed] == [True] * is_tall


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    mostly_nightly(
        [(24, 1024, 4096), (2, 192, 192), (1000, 64, 256), (1000, 128, 128)],
        (),
        [(24, 1024, 4096)],
    ),
    ids=str,
)
def test_a_composed_step_on_hopper_is_three_kernels(shape):
    """The Gram matrix, the chain and the application, which spill no registers."""
    program = NEWTON_SCHULZ.format(
        shape=shape, kwargs={"ns_coeffs": "balanced", "dtype": "float16"}
    )
    report = output_of(program, "NVIDIA H200", MOSAIC_GPU_DUMP_PTXAS="1")
    *_, entry = report.partition("ENTRY ")
    assert not re.search(r" dot\(|\"__cublas\$", entry)
    assert entry.count('custom_call_target="mosaic_gpu') == 3
    batch, m, n = shape
    assert f"f32[{batch},{m},{m}]" not in entry
    assert re.search(rf"ROOT.* = bf16\[{batch},{m},{n}\]\S* custom-call\(", entry)
    assert re.findall(r"\d+ bytes spill stores", report) == ["0 bytes spill stores"] * 3


@needs_compiler
def test_a_kernel_that_is_kept_compiles_once_the_compiler_has_partitioned():
    text = output_of(KEPT, "NVIDIA H200")
    (one, shard) = re.findall(r"^ .* custom-call\(.*mosaic_gpu.*", text, re.MULTILINE)
    assert "bf16[2,64,64]" in one and "bf16[2,64,64]" in shard


@needs_compiler
@pytest.mark.nightly
def test_matrices_of_a_group_are_written_where_they_go():
    """Three groups of eight, of tall ones, four of each, wide ones, one after the other.

    At most X and two Gram matrices, of 8 and of 4 MiB, are in memory beside the three results.
    """
    text = output_of(GROUPED, "NVIDIA H200")
    assert int(text[: text.index("\n")]) < (3 * 8 + 8 + 2 * 4) * 2**20
    entry = text[text.index("ENTRY") :]
    written = re.findall(r"= bf16\[([\d,]*)\]\S* fusion\(.*calls=\S*dynamic_update_slice", entry)
    assert collections.Counter(written) == {
        "8,1024,512": 8,
        "4,1024,512": 4,
        "4,512,1024": 4,
        "8,512,1024": 8,
    }
    # Kernels know no place that they write to or slice from: one for each of these shapes.
    kernels = re.findall(r"^%fused_dynamic_update_slice.*?^}", text, re.MULTILINE | re.DOTALL)
    assert len(kernels) == len(written)
    assert {*re.findall(r" constant\((\d+)\)| slice\(", "".join(kernels))} == {"0"}


@needs_compiler
@pytest.mark.nightly
def test_a_momentum_in_8_bits_is_in_float32_nowhere():
    """Temporaries grow by no more than the random bits, a byte an entry, and arrays of scales."""
    in_float32, in_8_bits, *on_four = map(int, output_of(STORED, "NVIDIA H200").split())
    assert in_8_bits <= in_float32 + 1024 * 4096 + 4 * 4 * 1024 * 384
    in_float32, in_8_bits = on_four
    assert in_8_bits <= in_float32 + 6 * 2048 * 2048 / 4


@needs_compiler
@pytest.mark.parametrize(
    ("hosts", "shardings"),
    [
        (1, "None"),
        pytest.param(1, "PartitionSpec(None, 'x')", marks=pytest.mark.nightly),
        pytest.param(8, "None", marks=pytest.mark.nightly),
    ],
)
def test_exchanges_are_in_bfloat16_while_kernels_run(hosts, shardings):
    """Five slots of 1 MiB for each of eight owners a host, in five buckets.

    At most three buckets are in memory beside the results in 16 bits.
    """
    text = output_of(UPDATE.format(hosts=hosts, shardings=shardings), "NVIDIA H200")
    assert int(text[: text.index("\n")]) <= (5 + 3) * 2**20 + 2**14
    entry = text[text.index("ENTRY") :]
    assert not re.search(r" (all-gather|all-reduce|collective-permute)", text)
    starts = re.findall(r"= \(\((\w+)\[.* all-to-all-start\(", entry)
    synchronous = re.findall(r"= (\w+)\[.* all-to-all\(", entry)
    assert (starts, synchronous) == (
        (["bf16"] * 10, []) if hosts == 1 else (["bf16"] * 9, ["bf16"])  # that of the first bucket
    )
    between = re.findall(r" all-to-all-start\(.*?(?= all-to-all-done\()", entry, re.DOTALL)
    hidden = ["mosaic_gpu" in window for window in between]
    assert sum(hidden) >= 4 and not hidden[0] and not hidden[-1]


@needs_compiler
@pytest.mark.parametrize(
    ("count", "each_round"),
    [
        (1, [("f32", "1,512,512", "all-reduce")]),
        (
            2,
            [
                ("f32", "1,128,512", "reduce-scatter"),
                ("f32", "4,128,512", "all-gather"),
                ("f16", "8,128,512", "all-gather"),
            ],
        ),
    ],
)
@pytest.mark.nightly
def test_of_matrices_in_pieces_gram_matrices_are_sent(count, each_round):
    """The largest entry first; then three rounds, of 14 symmetric products and 3 others in all."""
    text = output_of(IN_PIECES.format(count=count), "NVIDIA H200")
    entry = text[text.index("ENTRY") :]
    names = "all-reduce|reduce-scatter|all-to-all|all-gather"
    sent = re.findall(rf"= (?:\(.*, )?(\w+)\[([\d,]*)\]\S* ({names})(?:-start)?\(", entry)
    assert sent == [("f32", str(count), "all-reduce"), *each_round, *each_round, *each_round]
    assert entry.count('custom_call_target="mosaic_gpu') == 17


STEP = """
import optax
from muon_jax import muon

def kernels(layers):
    shapes = {"embedding": (1000, 256)}
    for i in range(layers):
        shapes |= {f"{i}/qkv": (256, 768), f"{i}/out": (256, 256), f"{i}/up": (256, 1024)}
        shapes |= {f"{i}/down": (1024, 256), f"{i}/bias": (1024,), f"{i}/norm": (256,)}
    sharding = NamedSharding(mesh, PartitionSpec())

    def typed(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    params = typed({k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in shapes.items()})
    numbers = {k: None if "embed" in k or len(v) == 1 else (0, 1) for k, v in shapes.items()}
    numbers = {k: v and MuonDimensionNumbers(*v) for k, v in numbers.items()}
    optimizer = muon(0.02, ns_coeffs="balanced", muon_weight_dimension_numbers=numbers)

    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = typed(jax.eval_shape(optimizer.init, params))
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
        text = lowered.compile().as_text()
    entry = text[text.index("ENTRY"):]
    assert " copy(" not in entry, "a parameter or a momentum is copied"
    return sum(entry.count(f" {kind}(") for kind in ("fusion", "custom-call"))

print(kernels(12))
"""


@needs_compiler
@pytest.mark.nightly
def test_a_step_has_fewer_kernels_than_parameters():
    assert int(output_of(STEP, "NVIDIA H200").split()[-1]) < 60 < 12 * 6
