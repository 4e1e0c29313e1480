"""Who says how parameters are sharded: optimizers at work in whole training steps."""

import functools
import itertools
import re
from pathlib import Path

import chex
import equinox as eqx
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from benchmarks._times.sharded import collectives
from muon_jax import (
    Exchange,
    MuonDimensionNumbers,
    NewtonSchulz,
    describe,
    muon,
    newton_schulz,
    scale_by_muon,
)
from muon_jax._distributed import automatic
from muon_jax._matrices.views import Split

SPECS = {"qkv": PartitionSpec("fsdp"), "out": PartitionSpec(None, "fsdp"), "bias": PartitionSpec()}
VIEWS = {"qkv": Split(-1, (16, 8, 8)), "out": MuonDimensionNumbers(), "bias": None}


def mesh_of(axis_type, sizes=(8,), names=("fsdp",)):
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))


def parameters(mesh=None):
    rng = np.random.default_rng(0)
    shapes = {"qkv": (16, 32), "out": (16, 16), "bias": (16,)}
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    if mesh:
        return {k: jax.device_put(v, NamedSharding(mesh, SPECS[k])) for k, v in params.items()}
    return jax.tree.map(jnp.asarray, params)


def optimizer(**kwargs):
    return optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            muon(
                1e-2,
                ns_steps=2,
                ns_coeffs=NewtonSchulz(dtype="float32"),
                weight_decay=0.1,
                muon_weight_dimension_numbers=VIEWS,
                **kwargs,
            ),
        ),
        every_k_schedule=2,
    )


def trained(params, **kwargs):
    """Parameters after 4 jitted steps on a loss, with donated state; the compiled step."""
    accumulating = optimizer(**kwargs)

    def loss(params, batch):
        q, k, v = jnp.split(batch @ params["qkv"], (16, 24), -1)
        hidden = jnp.tanh(q * jnp.concatenate([k, v], -1))
        return jnp.mean((hidden @ params["out"] + params["bias"] - 1) ** 2)

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, state = accumulating.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda x: x.sharding, params)
    state = jax.jit(accumulating.init)(params)
    batch = jax.random.normal(jax.random.key(0), (24, 16))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings, None))
    for _ in range(4):
        before = params["qkv"]
        params, state = jitted(params, state, batch)
        assert before.is_deleted()
    compiled = jitted.lower(params, state, batch).compile()
    return params, compiled


@helpers.slow
def test_training_steps_with_clipping_accumulation_and_donated_state():
    expected, _ = trained(parameters())
    for stated, axis_type in ((SPECS, AxisType.Auto), (None, AxisType.Auto)):
        params, compiled = trained(parameters(mesh_of(axis_type)), shardings=stated)
        assert collectives(compiled)["all-to-all"] == 2
        chex.assert_trees_all_close(jax.device_get(params), expected, atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_the_whole_update_of_muon_exchanges_twice(axis_type):
    """Neither views nor scales by shape nor AdamW move a parameter."""
    params = parameters(mesh_of(axis_type))
    transform = muon(
        1e-2, ns_coeffs=NewtonSchulz(dtype="float32"), muon_weight_dimension_numbers=VIEWS
    )
    state = transform.init(params)
    compiled = jax.jit(transform.update).lower(params, state, params).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    updates, _ = compiled(params, state, params)
    one = parameters()
    expected, _ = transform.update(one, transform.init(one), one)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-6)
    for name, x in params.items():
        assert updates[name].sharding.is_equivalent_to(x.sharding, x.ndim), name


@pytest.mark.parametrize("check_vma", helpers.mostly_nightly([True, False], [True]))
def test_inside_the_caller_s_shard_map(check_vma):
    """The scale by shape is that of the whole matrices, part by part."""
    mesh = mesh_of(AxisType.Auto)
    specs = {**SPECS, "qkv": PartitionSpec(None, "fsdp")}
    transform = muon(
        1.0,
        ns_coeffs=NewtonSchulz(dtype="float32"),
        muon_weight_dimension_numbers=VIEWS,
        shardings=specs,
    )

    def update(params):
        return transform.update(params, transform.init(params), params)[0]

    run = jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma)
    )
    compiled = run.lower(parameters()).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    chex.assert_trees_all_close(compiled(parameters()), update(parameters()), atol=1e-5)


@pytest.mark.parametrize(
    "specs",
    [
        {"q": ("fsdp",), "e": ("ep", "fsdp"), "up": ("ep", None, "fsdp")},
        pytest.param({"q": (), "e": ("ep",), "up": ("ep",)}, marks=helpers.nightly),
        pytest.param(
            {"q": (None, "fsdp"), "e": ("ep",), "up": (None, "ep", "fsdp")}, marks=helpers.nightly
        ),
    ],
)
def test_a_shard_map_that_tracks_what_varies_keeps_replicas(specs):
    """Experts differ along an axis along which a matrix of the same shape does not."""
    mesh = mesh_of(AxisType.Auto, (2, 4), ("ep", "fsdp"))
    rng = np.random.default_rng(0)
    shapes = {"q": (16, 16), "e": (4, 16, 16), "up": (2, 16, 32)}
    params = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    specs = {name: PartitionSpec(*spec) for name, spec in specs.items()}
    transform = scale_by_muon(
        ns_coeffs=NewtonSchulz(dtype="float32"),
        shardings=specs,
        weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
    )

    def update(params):
        return transform.update(params, transform.init(params))[0]

    run = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs))
    chex.assert_trees_all_close(run(params), update(params), atol=1e-5)


@pytest.mark.parametrize(
    "spec", helpers.mostly_nightly([("fsdp",), (None, "fsdp"), ()], [(None, "fsdp")])
)
def test_dual_norms_are_those_of_whole_parameters(spec):
    spec, params = PartitionSpec(*spec), {"out": parameters()["out"]}
    transform = scale_by_muon(
        adaptive=True, ns_coeffs=NewtonSchulz(dtype="float32"), shardings=spec
    )

    def update(params):
        return transform.update(params, transform.init(params))[0]

    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    chex.assert_trees_all_close(jax.jit(run)(params), update(params), atol=1e-4)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None))
        x = nn.Dense(16, kernel_init=init)(x)
        return nn.Dense(16)(nn.relu(x))


def test_linen_s_boxed_parameters():
    mesh, x = mesh_of(AxisType.Auto), jnp.ones((2, 16))
    variables = Layer().init(jax.random.key(0), x)
    transform = muon(1e-2, ns_steps=2, shardings=nn.get_partition_spec)
    expected, _ = muon(1e-2, ns_steps=2).update(variables, transform.init(variables), variables)
    shardings = nn.get_sharding(variables, mesh)
    variables = jax.device_put(variables, shardings)
    state = transform.init(variables)
    compiled = jax.jit(transform.update).lower(variables, state, variables).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    updates, _ = compiled(variables, state, variables)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-4)


def test_nnx_s_parameters():
    mesh = mesh_of(AxisType.Auto)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
    with jax.set_mesh(mesh):
        model = nnx.Linear(16, 16, kernel_init=init, rngs=nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        for stated in (nnx.get_partition_spec(params), nnx.get_partition_spec, None):
            transform = muon(1e-2, ns_steps=2, shardings=stated)
            state = transform.init(params)
            compiled = jax.jit(transform.update).lower(params, state, params).compile()
            assert collectives(compiled) == {"all-to-all": 2}
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
        before = np.asarray(model.kernel[...])
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
            model, optimizer, params
        )
    assert not np.allclose(model.kernel[...], before)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    assert model.kernel[...].sharding.is_equivalent_to(sharding, 2)


def test_injected_hyperparameters_are_operands():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        params = dict.fromkeys("ab", parameters(mesh_of(axis_type))["out"])
        iteration = NewtonSchulz((3.0, -3.0, 1.0), dtype="float32")
        injected = optax.inject_hyperparams(muon)(1e-2, iteration, 3)
        updates, _ = jax.jit(injected.update)(params, injected.init(params), params)
        one = dict.fromkeys("ab", parameters()["out"])
        expected, _ = injected.update(one, injected.init(one), one)
        chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-6)


@helpers.slow
def test_an_injected_number_of_steps_of_a_named_set():
    """`optax.inject_hyperparams` makes an array of the default, too."""
    params = parameters(mesh_of(AxisType.Auto))
    injected = optax.inject_hyperparams(muon)(
        1e-2, NewtonSchulz("dion", dtype="float32"), muon_weight_dimension_numbers=VIEWS
    )
    updates, _ = jax.jit(injected.update)(params, injected.init(params), params)
    plain = muon(1e-2, NewtonSchulz("dion", dtype="float32"), muon_weight_dimension_numbers=VIEWS)
    expected, _ = plain.update(parameters(), plain.init(parameters()), parameters())
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-6)


@pytest.mark.parametrize(
    "axis_type", helpers.mostly_nightly([AxisType.Explicit, AxisType.Auto], [AxisType.Explicit])
)
def test_vmap(axis_type):
    mesh = mesh_of(axis_type)
    x = np.random.default_rng(0).standard_normal((3, 16, 32)).astype(np.float32)
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2)
    updates = jax.vmap(lambda x: transform.update(x, transform.init(x))[0])
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    compiled = jax.jit(updates).lower(sharded).compile()
    assert collectives(compiled) == {"all-to-all": 2}
    np.testing.assert_allclose(compiled(sharded), updates(jnp.asarray(x)), atol=2e-6)


@pytest.mark.parametrize(
    "axis_type", helpers.mostly_nightly([AxisType.Explicit, AxisType.Auto], [AxisType.Auto])
)
@helpers.slow
def test_an_ensemble_whose_members_are_on_devices_of_their_own(axis_type):
    """Tall, wide and split matrices of each, and stacks of members in stacks."""
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh_of(axis_type, (8,), ("member",)), PartitionSpec("member"))
    shapes = {"tall": (32, 16), "wide": (2, 16, 32), "split": (16, 48)}
    members = {
        name: jax.device_put(rng.standard_normal((8, *shape)).astype(np.float32), sharding)
        for name, shape in shapes.items()
    }
    views = {"tall": MuonDimensionNumbers(1, 0), "wide": MuonDimensionNumbers(1, 2)}
    views["split"] = Split(1, (32, 16), [MuonDimensionNumbers(0, 1), MuonDimensionNumbers(-2, -1)])
    transform = scale_by_muon(
        ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2, weight_dimension_numbers=views
    )
    update = jax.vmap(lambda x: transform.update(x, transform.init(x))[0])
    compiled = jax.jit(update).lower(members).compile()
    assert not re.search(r"= f32\S* (all-gather|all-to-all|while)\(", compiled.as_text())
    updates = compiled(members)
    assert updates["tall"].sharding.is_equivalent_to(sharding, 3)
    twice = jax.jit(jax.vmap(update))({k: v[None] for k, v in members.items()})
    members, updates, twice = jax.device_get((members, updates, twice))
    for i in (0, 7):
        member = {k: jnp.asarray(v[i]) for k, v in members.items()}
        expected, _ = transform.update(member, transform.init(member))
        for found in (updates, {k: v[0] for k, v in twice.items()}):
            chex.assert_trees_all_close({k: v[i] for k, v in found.items()}, expected, atol=2e-6)


@helpers.slow
def test_an_ensemble_of_modules_that_are_callable():
    sharding = NamedSharding(mesh_of(AxisType.Auto, (8,), ("member",)), PartitionSpec("member"))
    linear = functools.partial(eqx.nn.Linear, 16, 32, use_bias=False)
    members = jax.vmap(lambda key: linear(key=key))(jax.random.split(jax.random.key(0), 8))
    transform = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2)

    def update(module):
        return transform.update(module, transform.init(module))[0]

    updates = jax.jit(jax.vmap(update))(jax.device_put(members, sharding))
    expected = jax.vmap(update)(members)
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=2e-6)
    (group,) = describe(linear(key=jax.random.key(0))).groups
    assert group.shape == (1, 16, 32)


def test_an_ensemble_over_hyperparameters():
    params = {"out": parameters(mesh_of(AxisType.Auto))["out"]}

    def update(eps):
        transform = scale_by_muon(eps=eps, ns_coeffs=NewtonSchulz(dtype="float32"), ns_steps=2)
        return transform.update(params, transform.init(params))[0]["out"]

    eps = jnp.array([1e-8, 10.0])
    together = jax.jit(jax.vmap(update))(eps)
    chex.assert_trees_all_close(together, jnp.stack([*map(jax.jit(update), eps)]), atol=2e-6)
    assert not np.allclose(*together, atol=1e-2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_program_of_update_does_not_depend_on_where_init_ran(kind):
    params = {"out": parameters(mesh_of(kind))["out"]}
    replicated = jax.device_put(params, NamedSharding(mesh_of(kind), PartitionSpec()))
    state = scale_by_muon().init(params)

    def program(init):
        transform = scale_by_muon()
        init(transform)
        text = jax.jit(transform.update).lower(params, state).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    nowhere = program(lambda _: None)
    assert nowhere == program(lambda transform: transform.init(params))
    assert nowhere == program(lambda transform: transform.init(replicated))
    assert nowhere == program(lambda transform: jax.jit(transform.init)(params))


def test_programs_differ_where_the_partitioned_operation_does(monkeypatch):
    """JAX's cache of compiled programs may leave the pointer to the operation out of its key."""
    params = {"out": parameters(mesh_of(AxisType.Auto))["out"]}

    def program(**kwargs):
        transform = scale_by_muon(**kwargs)
        text = jax.jit(transform.update).lower(params, transform.init(params)).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    assert program() == program()
    others = [
        {"ns_coeffs": "dion"},
        {"ns_coeffs": NewtonSchulz(max_group_bytes=1)},
        {"ns_coeffs": NewtonSchulz(dtype="float32")},
    ]
    words = ("gram_or_exchange", "exchange", "split", {"fsdp": "exchange", ...: "raise"})
    others += [{"shardings": Exchange(axes)} for axes in words]
    programs = {program(**kwargs) for kwargs in [{}, *others]}
    with jax.default_matmul_precision("highest"):
        programs.add(program())
    automatic.code_id.cache_clear()
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"\n")  # edited
    programs.add(program())
    automatic.code_id.cache_clear()
    assert len(programs) == 10


def test_a_mesh_of_one_device_and_none_run_as_before():
    here = {"out": parameters()["out"]}
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec("fsdp")))
    for params, stated in ((here, None), (there, None), (there, PartitionSpec("fsdp"))):
        transform = scale_by_muon(shardings=stated)
        text = jax.jit(transform.update).lower(params, transform.init(params)).as_text()
        assert "dot_general" in text
        assert "sdy.manual" not in text and "CustomSPMDPartitioning" not in text


def test_in_a_shard_map_shards_are_rounded_by_random_bits_of_their_own():
    mesh = mesh_of(AxisType.Auto, (4, 2), ("fsdp", "replica"))
    spec = PartitionSpec("fsdp")
    transform = scale_by_muon(shardings=spec, mu_dtype="bfloat16", mu_rounding="stochastic")

    def momentum(x):
        return transform.update({"w": x}, transform.init({"w": x}))[1].mu["w"]

    run = jax.shard_map(momentum, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    out = jax.jit(run)(jnp.full((16, 8), 1 / 3))
    shards = [np.asarray(shard.data, np.float32) for shard in out.addressable_shards]
    indices = [shard.index for shard in out.addressable_shards]
    for (i, x), (j, y) in itertools.combinations(zip(indices, shards, strict=True), 2):
        assert (x == y).all() == (i == j)


@pytest.mark.parametrize(
    "axis_type", helpers.mostly_nightly([AxisType.Auto, AxisType.Explicit], [AxisType.Auto])
)
@pytest.mark.parametrize(
    ("dtype", "mu_dtype"),
    [
        ("float32", "bfloat16"),
        pytest.param("bfloat16", "float32", marks=helpers.nightly),
    ],
)
def test_the_momentum_is_computed_in_the_wider_dtype_on_any_mesh(dtype, mu_dtype, axis_type):
    transform = scale_by_muon(mu_dtype=mu_dtype)

    def momentum(x):
        state = transform.init({"w": x})
        for i in range(3):
            _, state = jax.jit(transform.update)({"w": (x * (1 + i)).astype(dtype)}, state)
        return state.mu["w"]

    x = parameters()["qkv"].astype(dtype)
    sharding = NamedSharding(mesh_of(axis_type), PartitionSpec("fsdp"))
    chex.assert_trees_all_equal(momentum(jax.device_put(x, sharding)), momentum(x))


@pytest.mark.parametrize(
    "spec",
    helpers.mostly_nightly([("fsdp",), (None, "fsdp"), (None, ("fsdp", "tensor"))], [("fsdp",)]),
)
@helpers.slow
def test_explicit_axes_of_one_device(spec):
    """They are part of the types of arrays that nothing divides."""
    mesh = jax.make_mesh(
        (1, 1), ("fsdp", "tensor"), (AxisType.Explicit,) * 2, devices=jax.devices()[:1]
    )
    here = {k: parameters()[k] for k in ("qkv", "out")}
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec(*spec)))
    transform = scale_by_muon(weight_dimension_numbers={k: VIEWS[k] for k in here})
    expected, _ = transform.update(here, transform.init(here))
    for update in (transform.update, jax.jit(transform.update)):
        updates, _ = update(there, transform.init(there))
        chex.assert_trees_all_equal(jax.device_get(updates), expected)
        assert all(jax.typeof(updates[k]) == jax.typeof(there[k]) for k in there)
    np.testing.assert_array_equal(newton_schulz(there["out"]), newton_schulz(here["out"]))


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_of_the_iteration_on_explicit_axes_in_force(devices):
    """Their types have the mesh, too, and a `shard_map` closes over none of such."""
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:devices])
    stack = helpers.random_tree({"w": (2, 8, 12)}, 0)
    view = {"w": MuonDimensionNumbers(-2, -1)}
    injected = optax.inject_hyperparams(muon)(0.02, eps=1e-3, muon_weight_dimension_numbers=view)
    expected, _ = injected.update(stack, injected.init(stack), stack)

    def of_eps_and_coeffs(x, eps):
        scaled = NewtonSchulz(before=jax.tree_util.Partial(jnp.multiply, eps))
        return newton_schulz(x, (eps, -4.775, 2.0315), eps=eps), newton_schulz(x, scaled)

    by_eps = of_eps_and_coeffs(stack["w"], jnp.float32(3.4))
    there = jax.device_put(stack, NamedSharding(mesh, PartitionSpec("x")))
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(injected.update)(there, injected.init(there), there)
        got = jax.jit(of_eps_and_coeffs)(there["w"], jnp.float32(3.4))
    assert jax.typeof(updates["w"]) == jax.typeof(there["w"])
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-4)
    chex.assert_trees_all_close(jax.device_get(got), by_eps, atol=1e-2)


def test_explicit_axes_that_divide_a_stack_or_a_matrix():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Explicit,) * 2)
    x = np.random.default_rng(0).standard_normal((8, 16, 32)).astype(np.float32)
    stack = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "tensor"))))
    result = newton_schulz(stack, dtype="float32")
    assert jax.typeof(result) == jax.typeof(stack)
    np.testing.assert_allclose(result, newton_schulz(x, dtype="float32"), atol=2e-6)
    divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", None, "tensor")))
    with pytest.raises(ValueError, match=r"\(jax.reshard\) to P\('data',\), or use"):
        newton_schulz(divided)
    gathered = jax.reshard(divided, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_allclose(newton_schulz(gathered, dtype="float32"), result, atol=2e-6)


@helpers.slow
def test_kernels_on_explicit_axes_of_one_device():
    mesh = AbstractMesh((1,), ("fsdp",), (AxisType.Explicit,), abstract_device=helpers.GPUS["H200"])
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(functools.partial(newton_schulz, implementation="mosaic_gpu")).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_adamw_alone_under_a_mesh():
    bias = {"bias": parameters(mesh_of(AxisType.Auto))["bias"]}
    transform = muon(1e-2)
    updates, _ = jax.jit(transform.update)(bias, transform.init(bias), bias)
    assert np.all(updates["bias"] != 0)


def update(params, **kwargs):
    transform = scale_by_muon(**kwargs)
    return jax.jit(transform.update)(params, transform.init(params))


def matrix(*axis_types, sizes=(4, 2)):
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=axis_types)
    return {"w": jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, PartitionSpec("x")))}


def in_shard_map(names, sizes=(4, 2), **kwargs):
    mesh = mesh_of(AxisType.Auto, sizes, ("x", "y"))
    spec = PartitionSpec("x")
    run = jax.shard_map(
        lambda params: update(params, **kwargs)[0],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=names,
    )
    return jax.jit(run)({"w": jnp.ones((16, 16))})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: in_shard_map({"x", "y"}), ValueError, r"Manual.*pass shardings="),
        (
            lambda: in_shard_map({"x"}, shardings=PartitionSpec("x")),
            NotImplementedError,
            r"shard_map over some axes.*call the optimizer outside it",
        ),
        (
            lambda: in_shard_map({"x"}, (1, 8), shardings=PartitionSpec("x")),
            NotImplementedError,
            r"shard_map over some axes.*call the optimizer outside it",
        ),
        (
            lambda: update(matrix(AxisType.Explicit, AxisType.Auto, sizes=(1, 8))),
            ValueError,
            r"'x': Explicit, 'y': Auto\}: pass shardings=",
        ),
        (
            lambda: update(matrix(AxisType.Auto, AxisType.Explicit)),
            ValueError,
            r"'x': Auto, 'y': Explicit\}: pass shardings=",
        ),
        (
            lambda: update(matrix(AxisType.Auto, AxisType.Auto), shardings={"w": "x"}),
            ValueError,
            r"shardings\['w'\] must be a PartitionSpec, a NamedSharding or None, got 'x'",
        ),
        (
            lambda: update(
                matrix(AxisType.Auto, AxisType.Auto),
                shardings=PartitionSpec("x", PartitionSpec.UNCONSTRAINED),
            ),
            ValueError,
            r"shardings must say how every axis is sharded",
        ),
        (
            lambda: update(matrix(AxisType.Auto, AxisType.Auto), shardings=PartitionSpec("embed")),
            ValueError,
            r"parameter \['w'\].*\('embed',\) must name axes of the mesh \{'x': 4",
        ),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_was_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_mixed_mesh_with_specs():
    params = matrix(AxisType.Auto, AxisType.Explicit)
    params["w"] = params["w"] * jnp.arange(16.0)[:, None]
    updates, _ = update(params, shardings=PartitionSpec("x"))
    expected, _ = update({"w": jnp.asarray(np.asarray(params["w"]))})
    chex.assert_trees_all_close(jax.device_get(updates), expected, atol=1e-3)


def test_a_mesh_in_force_on_which_no_argument_is():
    transform, params = scale_by_muon(), {"out": parameters()["out"]}
    state = transform.init(params)
    expected, _ = transform.update(params, state)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        updates, _ = jax.jit(transform.update)(params, state)
        chex.assert_trees_all_close(updates, expected, atol=1e-3)

        def sharded(params):
            return transform.update(jax.lax.with_sharding_constraint(params, SPECS["qkv"]), state)

        with pytest.raises(jax.errors.JaxRuntimeError, match="pass shardings=, or put one there"):
            jax.jit(sharded)(params)
