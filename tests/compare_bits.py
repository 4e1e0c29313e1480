"""Shows that two versions of the library compute the same bits on this machine.

    python tests/compare_bits.py TREE_A TREE_B [--only REGEX] [--optimized] [--verbose]

A tree is the path of a checkout, or a commit of this repository. Each tree computes every
configuration in a process of its own, on eight simulated devices or on the GPUs of this machine.
Both processes run at once.

A configuration's digest is the SHA-256 of all arrays that it returns: paths, dtypes, shapes, and
the bytes of every shard. The script exits with status 1 when a digest differs, when a configuration
raises an error of another type, or when only one of the trees has it. It uses public names alone,
so it runs on any version (`iteration`, `exchanged`, `optimizer` and `contrib` spell what moved).
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
CONFIGURATIONS: dict[str, Callable[[], Any]] = {}
DIGESTS = "compare_bits: "  # begins the line with the results of a process


def main() -> int:
    """Runs this script on both trees and prints where their digests differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="+", help="two checkouts or commits")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--optimized", action="store_true", help="compile with all optimizations")
    parser.add_argument("--verbose", action="store_true", help="print processor seconds of each")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digests:
        return print_digests(options)
    if len(options.trees) != 2:
        parser.error(f"needs two trees, got {len(options.trees)}")
    start = time.monotonic()
    with ThreadPoolExecutor() as at_once:
        found = [*at_once.map(lambda tree: digests_of(tree, options), options.trees)]
    print(f"{len(found[0])} and {len(found[1])} configurations in {time.monotonic() - start:.0f} s")
    return report(*found)


@contextlib.contextmanager
def checkout(tree: str) -> Iterator[Path]:
    """Yields the path of a checkout, or of a commit in a temporary work tree."""
    if (Path(tree) / "muon_jax").is_dir():
        yield Path(tree).resolve()
        return
    repository = HERE.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        git = ["git", "-C", str(repository), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), tree], check=True)
        try:
            yield path.resolve()
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def digests_of(tree: str, options: argparse.Namespace) -> dict[str, str]:
    """Returns the digests of a checkout or a commit."""
    with checkout(tree) as path:
        return run_in(path, options)


def run_in(tree: Path, options: argparse.Namespace) -> dict[str, str]:
    """Runs this script in a process that imports the packages of `tree`."""
    # Without autotuning every process takes the same algorithms of the vendor's libraries.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {**os.environ, "PYTHONPATH": str(tree), "XLA_FLAGS": flags}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # two processes share a GPU
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, str(HERE), "--digests", str(tree), "--only", options.only]
    command += ["--verbose"] * options.verbose + ["--optimized"] * options.optimized
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith(DIGESTS)]
    if result.returncode or len(lines) != 1:
        sys.exit(f"{tree}: no digests, exit status {result.returncode}")
    return json.loads(lines[0].removeprefix(DIGESTS))


def report(a: dict[str, str], b: dict[str, str]) -> int:
    """Prints the comparison; returns the exit status."""
    names = [*a, *(name for name in b if name not in a)]
    different = [name for name in names if a.get(name) != b.get(name)]
    raised = [name for name in names if name not in different and a[name].startswith("raised")]
    rows = {
        "configurations": len(names),
        "equal": len(names) - len(different),
        "different": len(different),
        "raised in both": len(raised),
    }
    for label, count in rows.items():
        print(f"{label:<15} {count:>4}")
    for name in raised:
        print(f"  {name}: {a[name]}")
    for name in different:
        print(f"  DIFFERENT {name}: {a.get(name, 'absent')[:20]} | {b.get(name, 'absent')[:20]}")
    return 1 if different or not names else 0


def print_digests(options: argparse.Namespace) -> int:
    """Computes all configurations with the packages that this process imports."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_disable_most_optimizations", not options.optimized)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # plugins without a GPU
    import muon_jax
    import pallas_kernels

    for package in (muon_jax, pallas_kernels):
        assert Path(str(package.__file__)).is_relative_to(options.trees[0]), package.__file__
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    define_iterations()
    define_updates()
    define_sharded()
    if jax.default_backend() == "gpu":
        define_kernels()
    digests = {}
    for name, compute in CONFIGURATIONS.items():
        if not re.search(options.only, name):
            continue
        start = time.process_time()
        try:
            digests[name] = digest(compute())
        except Exception as error:
            digests[name] = f"raised {type(error).__name__}"
            if options.verbose:
                print(f"    {error}", file=sys.stderr)
        if options.verbose:
            print(f"{time.process_time() - start:6.1f} s  {name}", file=sys.stderr)
    print(DIGESTS + json.dumps(digests))
    return 0


def digest(tree: Any) -> str:
    """Returns the SHA-256 of all leaves of `tree`."""
    import jax
    import numpy as np

    hashed = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        x = jax.numpy.asarray(leaf)
        hashed.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
        for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id):
            hashed.update(f"{shard.device.id} {shard.index}".encode())
            hashed.update(np.asarray(shard.data).tobytes())
    return hashed.hexdigest()


def add(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Adds a configuration: what `function` returns for these arguments."""
    assert name not in CONFIGURATIONS, name
    CONFIGURATIONS[name] = functools.partial(function, *args, **kwargs)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = "float32", scale: float = 1.0) -> Any:
    """Returns numbers from numpy's generator, the same on every device."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * scale
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.standard_normal(shape) * scale
    return jnp.asarray(x).astype(dtype)


# ------------------------------------------------------------------------------ newton_schulz


def define_iterations() -> None:
    """Adds the configurations of `newton_schulz`."""
    import jax
    import jax.numpy as jnp

    from muon_jax import newton_schulz

    def iterate(
        shape: tuple[int, ...], *args: Any, in_dtype: str = "float32", **kwargs: Any
    ) -> Any:
        return newton_schulz(normal(0, shape, in_dtype), *args, **kwargs)

    def iterations(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        add(f"newton_schulz, {name}", iterate, shape, *args, **kwargs)

    published = ("standard", "standard_1.02", "dion", "polar_express", "polar_express_nanogpt")
    published += ("polar_express_nvidia", "cans", "deepseek_v4", "cubic")
    composed = ("fast", "balanced", "accurate")
    for name in published:
        iterations(name, (24, 40), name)
    for name in ("standard", "polar_express", "dion"):
        iterations(f"{name}, gram", (16, 72), name, method="gram")
    for name in composed:
        iterations(name, (24, 40), name)
        iterations(f"{name}, bfloat16, wide", (16, 96), name, dtype="bfloat16")
    iterations("balanced, float32", (24, 40), "balanced", dtype="float32")
    for name in ("aol", "aol_nvidia"):
        iterations(name, (24, 40), name, preconditioning="aol")
    iterations("triple", (24, 40), (3.0, -3.0, 1.0), 3)
    iterations("table", (24, 40), ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)))
    iterations("dion, 3 steps", (24, 40), "dion", 3)
    for method in ("standard", "gram", None):
        for dtype in (None, "float32", "float16"):
            iterations(f"{method}, {dtype}", (20, 80), method=method, dtype=dtype)
    iterations("bfloat16", (24, 40), dtype="bfloat16")
    iterations("gram, bfloat16", (24, 96), method="gram", dtype="bfloat16")
    iterations("gram, deepseek_v4", (24, 96), "deepseek_v4", method="gram")  # not in 16 bits
    for kind in ("spectral", "schatten", "aol"):
        iterations(f"by {kind}", (24, 40), preconditioning=kind)
        iterations(f"{kind}, tall, eps", (40, 24), "dion", eps=0.5, preconditioning=kind)
    iterations("aol, gram", (16, 64), "aol", preconditioning="aol", method="gram")
    for mode in ("add", "max"):
        iterations(f"eps, {mode}", (24, 40), eps=50.0, eps_mode=mode)
        iterations(f"balanced, eps, {mode}", (24, 40), "balanced", eps=5.0, eps_mode=mode)
    iterations("square, odd", (37, 37))
    iterations("tall, odd", (53, 19))
    iterations("tall stack", (3, 2, 40, 24))
    iterations("balanced, tall stack", (3, 40, 24), "balanced")
    iterations("gram, tall", (96, 16), method="gram")
    iterations("one row", (1, 17))
    iterations("empty stack", (0, 8, 12))
    iterations("bfloat16 in", (24, 40), in_dtype="bfloat16")
    iterations("float16 in, gram", (24, 96), in_dtype="float16", method="gram")
    iterations("complex64", (24, 40), in_dtype="complex64")
    iterations("complex64, schatten", (24, 40), in_dtype="complex64", preconditioning="schatten")
    iterations("complex64, balanced", (24, 40), "balanced", in_dtype="complex64")

    def float64() -> Any:
        with jax.enable_x64(True):
            x = normal(0, (24, 40), "float64")
            return [newton_schulz(x, name, dtype=None) for name in ("standard", "balanced")]

    def special_values() -> Any:
        x = normal(0, (6, 16, 24))
        x = x.at[1].set(0).at[2, 3, 4].set(jnp.nan).at[3, 0, 0].set(jnp.inf)
        x = x.at[4].multiply(1e30).at[5].multiply(1e-30)
        return [newton_schulz(x, name) for name in ("standard", "balanced")]

    def derivative(name: str, **kwargs: Any) -> Any:
        def loss(x: Any) -> Any:
            return jnp.sum(newton_schulz(x, name, implementation="xla", **kwargs) ** 3)

        return jax.jit(jax.grad(loss))(normal(0, (16, 24)))

    def inside(x: Any) -> Any:
        return newton_schulz(x * 2 + 1, "polar_express") * 3

    def of_injected_eps(eps: Any) -> Any:
        return newton_schulz(normal(0, (16, 24)), eps=eps)

    add("newton_schulz, float64", float64)
    add("newton_schulz, zeros, NaN, infinity, huge, tiny", special_values)
    add("newton_schulz, vmap", lambda: jax.vmap(newton_schulz)(normal(0, (3, 24, 40))))
    add("newton_schulz, vmap of eps", lambda: jax.vmap(of_injected_eps)(jnp.array([0.0, 9.0])))
    add("newton_schulz, in a jit", lambda: jax.jit(inside)(normal(0, (24, 40))))
    add("newton_schulz, gradient, standard", derivative, "standard", dtype="float32")
    add("newton_schulz, gradient, cubic, gram", derivative, "cubic", dtype=None, method="gram")
    add("newton_schulz, gradient, balanced", derivative, "balanced")


# ------------------------------------------------------------------------------ updates


def updates_of(
    transform: Any, params: Any, missing: str | None = None, jitted: bool = True, **extra: Any
) -> Any:
    """Returns three updates of `params`, and the last state.

    Args:
        transform: the optimizer.
        params: the parameters, which stay as they are.
        missing: the name of a parameter whose second gradient is None.
        jitted: whether the update is compiled as a whole.
        **extra: arguments of the update.
    """
    import jax

    update = jax.jit(transform.update) if jitted else transform.update
    state, found = committed(transform.init(params), params), []
    for seed in (1, 2, 3):
        gradients = gradients_of(params, seed)
        if seed == 2 and missing:
            gradients[missing] = None
        updates, state = update(gradients, state, params, **extra)
        found.append(updates)
    return found, state


def committed(state: Any, params: Any) -> Any:
    """Returns the state placed as the update returns it: one program serves every update."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding if x.ndim else sharding), state)


def gradients_of(params: Any, seed: int) -> Any:
    """Returns random numbers in the shapes, dtypes and shardings of `params`."""
    import jax

    leaves, treedef = jax.tree.flatten(params)
    drawn = [normal(100 * seed + i, x.shape, x.dtype) for i, x in enumerate(leaves)]
    placed = [jax.device_put(x, param.sharding) for x, param in zip(drawn, leaves, strict=True)]
    return treedef.unflatten(placed)


def parameters(dtype: str = "float32") -> dict[str, Any]:
    """Returns matrices of two shapes, one of them transposed, and a vector."""
    shapes = {"a": (16, 24), "b": (24, 16), "c": (16, 24), "d": (12, 12), "bias": (16,)}
    return {name: normal(i, shape, dtype) for i, (name, shape) in enumerate(shapes.items())}


def gpt() -> dict[str, Any]:
    """Returns the parameters of a small language model, as `by_role` knows them."""
    layer = {
        "attention/query/kernel": (16, 4, 4),
        "attention/key/kernel": (16, 4, 4),
        "attention/value/kernel": (16, 4, 4),
        "attention/out/kernel": (4, 4, 16),
        "mlp/up/kernel": (16, 64),
        "mlp/down/kernel": (64, 16),
        "norm/scale": (16,),
    }
    shapes = {f"layer_0/{path}": shape for path, shape in layer.items()}
    shapes |= {"embed/embedding": (50, 16), "lm_head/kernel": (16, 50)}
    shapes |= {"layer_1/attention/qkv/kernel": (16, 48), "layer_1/mlp/gate_up/kernel": (16, 128)}
    tree: dict[str, Any] = {}
    for i, (path, shape) in enumerate(shapes.items()):
        *above, last = path.split("/")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = normal(i, shape)
    return tree


def iteration(coeffs: Any = "standard", **attributes: Any) -> dict[str, Any]:
    """Arguments of an optimizer for `NewtonSchulz(coeffs, **attributes)`, in either spelling."""
    import muon_jax

    if hasattr(muon_jax, "NewtonSchulz"):
        return {"ns_coeffs": muon_jax.NewtonSchulz(coeffs, **attributes)}
    old = {"dtype": "ns_dtype", "method": "ns_method"}
    return {"ns_coeffs": coeffs, **{old.get(name, name): x for name, x in attributes.items()}}


def contrib() -> Any:
    """The module that has what few users need: in older trees, the package itself."""
    try:
        return importlib.import_module("muon_jax.contrib")
    except ImportError:
        return importlib.import_module("muon_jax")


def optimizer(*args: Any, **arguments: Any) -> Any:
    """`muon` with these arguments, of which some made functions of contrib later."""
    import muon_jax

    place, preset = contrib(), arguments.get("preset")
    if place is muon_jax:
        if arguments.pop("on_host", False):
            arguments["state_memory_kind"] = "pinned_host"
        return muon_jax.muon(*args, **arguments)
    if arguments.pop("on_host", False):
        arguments["mu_dtype"] = place.on_host(arguments.get("mu_dtype"))
    if preset in ("nanogpt", "muonh", "adamuon"):
        del arguments["preset"]
        return getattr(place, preset)(*args, **arguments)
    make = place.normuon if "normuon_b2" in arguments else muon_jax.muon
    return make(*args, **arguments)


def exchanged(axes: Any = (), shardings: Any = None, **old: Any) -> dict[str, Any]:
    """Arguments of an optimizer for `Exchange(axes, shardings=shardings)`, or the old ones."""
    import muon_jax

    if hasattr(muon_jax, "Exchange"):
        return {"shardings": muon_jax.Exchange(axes, shardings=shardings)}
    return {"shardings": shardings, **old}


# What `distributed_gram` was.
IN_GRAM_FORM = {"axes": "gram_or_exchange", "distributed_gram": True}
EXCHANGED_WHOLE = {"axes": "exchange", "distributed_gram": False}


def define_updates() -> None:
    """Adds the configurations of optimizers on one device."""
    import jax
    import jax.numpy as jnp
    import optax

    import muon_jax
    from muon_jax import MuonDimensionNumbers, Split, Unfold, muon, scale_by_muon

    def updates(name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        add(f"update, {name}", lambda: updates_of(make(*args, **kwargs), parameters()))

    def of(name: str, params: Callable[[], Any], make: Callable[..., Any], **kwargs: Any) -> None:
        add(f"update, {name}", lambda: updates_of(make(**kwargs), params()))

    later = ["adamuon"] * hasattr(contrib(), "adamuon")
    for preset in dict.fromkeys([*muon_jax.PRESETS, "nanogpt", "muonh", *later]):
        adamh = {"adamh": None} if preset == "muonh" else {}
        updates(f"preset {preset}", optimizer, 0.02, preset=preset, **adamh)
    large = {"up": (64, 96), "down": (96, 64), "head": (512, 160), "bias": (64,)}
    of_large = {name: MuonDimensionNumbers() if name in ("up", "down") else None for name in large}

    def stored(**arguments: Any) -> Any:
        params = {name: normal(i, shape) for i, (name, shape) in enumerate(large.items())}
        made = optimizer(0.02, muon_weight_dimension_numbers=of_large, **arguments)
        return updates_of(made, params)

    for mu_dtype in (None, "bfloat16", "int8"):
        add(f"update, muon, {mu_dtype} on the host", stored, on_host=True, mu_dtype=mu_dtype)
    add("update, muon, int8", stored, mu_dtype="int8")
    add("update, muon, int8 to nearest", stored, mu_dtype="int8", mu_rounding="nearest")
    add("update, nanogpt, int8", stored, preset="nanogpt", mu_dtype="int8")
    add("update, muonh, head", stored, preset="muonh", adamh="head", mu_dtype="bfloat16")
    add("update, muon, cast", lambda: contrib().cast_momentum(stored()[1], "int8"))
    for name in ("balanced", "cans", "polar_express"):
        updates(f"muon, {name}", muon, 0.02, name)
    updates("muon, no Nesterov momentum", muon, 0.02, nesterov=False)
    updates("muon, adaptive", muon, 0.02, adaptive=True)
    for form in ("bias_corrected", "ema", "heavy_ball"):
        updates(f"muon, {form}", muon, 0.02, momentum=form, eps_mode="max", eps=0.5)
    for form in ("decoupled", "independent", "palm", "scaled_palm", "l2"):
        decay = {"weight_decay": 0.1, "adam_weight_decay": 0.2, "weight_decay_form": form}
        updates(f"muon, decay {form}", muon, 0.02, **decay)
    updates(
        "muon, cautious, masked decay",
        muon,
        optax.linear_schedule(0.02, 0.01, 3),
        weight_decay=optax.linear_schedule(0.1, 0.2, 3),
        weight_decay_mask=lambda params: jax.tree.map(lambda p: p.shape != (12, 12), params),
        cautious_weight_decay=True,
    )
    for scale in ("clipped_ratio", "ratio", "none"):
        updates(f"muon, scale {scale}", muon, 0.02, shape_scale=scale, **iteration(method="gram"))
    updates("muon, consistent_rms", muon, 0.02, consistent_rms=0.2, adam_learning_rate=1e-3)
    for averaged in ("fan_in", "shorter"):
        updates(
            f"muon, NorMuon {averaged}", optimizer, 0.02, normuon_b2=0.9, normuon_averaged=averaged
        )
    rounding = {"mu_dtype": "bfloat16", "mu_rounding": "stochastic"}
    updates("muon, stochastic rounding", muon, 0.02, **rounding)
    updates("muon, momentum in bfloat16", muon, 0.02, mu_dtype="bfloat16", **iteration(dtype=None))
    for size in (0, 2 * 16 * 24 * 4):
        updates(f"muon, groups of {size} bytes", muon, 0.02, **iteration(max_group_bytes=size))
    for kind in ("spectral", "schatten", "aol"):
        updates(f"muon, {kind}", muon, 0.02, "cubic", preconditioning=kind)

    bfloat16 = functools.partial(parameters, "bfloat16")
    of("muon, parameters in bfloat16", bfloat16, muon, learning_rate=0.02, weight_decay=0.1)
    of("muon, bfloat16, momentum in float32", bfloat16, muon, learning_rate=0.02, mu_dtype="f4")
    eager = functools.partial(updates_of, jitted=False)
    add("update, muon, eager", lambda: eager(muon(0.02), parameters()))
    add("update, muon, a missing gradient", lambda: updates_of(muon(0.02), parameters(), "b"))
    add("update, muon, missing bias, eager", lambda: eager(muon(0.02), parameters(), "bias"))

    routed = {"learning_rate": 0.02, "muon_weight_dimension_numbers": muon_jax.by_role}
    of("by_role", gpt, muon, **routed)
    of("by_role, balanced, moonlight", gpt, muon, **routed, ns_coeffs="balanced", preset="torch")
    of("by_role, nanogpt", gpt, optimizer, **routed, preset="nanogpt")
    of("by_role, muonh", gpt, optimizer, **routed, preset="muonh")

    # Matrices of 16 × 32 and of 16 × 16, so that programs are small.
    shapes = {"plain": (32, 16), "filters": (2, 2, 4, 32), "heads": (16, 4, 8)}
    shapes |= {"experts": (2, 3, 16, 32), "fused": (16, 64), "merged": (16, 32), "nested": (16, 64)}
    views = {
        "plain": MuonDimensionNumbers(1, 0),
        "filters": MuonDimensionNumbers((0, 1, 2), 3),
        "heads": MuonDimensionNumbers(0, (1, 2)),
        "experts": MuonDimensionNumbers(-2, -1),
        "fused": Split(-1, (32, 16, 16)),
        "merged": Unfold(-1, (1, -1, 16), MuonDimensionNumbers(-4, -1)),
        "nested": Split(
            1,
            (32, 32),
            [MuonDimensionNumbers(0, 1), Unfold(-1, (-1, 16), MuonDimensionNumbers(-3, -1))],
        ),
    }

    def viewed() -> Any:
        return {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}

    by_views: dict[str, Any] = {"weight_dimension_numbers": views}
    of("views", viewed, scale_by_muon, **by_views)
    of("views, adaptive", viewed, scale_by_muon, **by_views, adaptive=True, nesterov=False)
    of("views, cans", viewed, scale_by_muon, **by_views, ns_coeffs="cans")
    of("views, a callable", viewed, scale_by_muon, weight_dimension_numbers=lambda params: views)
    in_muon = {"learning_rate": 0.02, "muon_weight_dimension_numbers": views}
    of("views, NorMuon", viewed, optimizer, **in_muon, normuon_b2=0.9, consistent_rms=0.2)
    add(
        "update, views, by_normuon, norms",
        lambda: updates_of(
            optax.chain(
                scale_by_muon(**by_views),
                contrib().scale_by_normuon(0.9, 1e-8, views, "shorter"),
                contrib().scale_to_param_norm(views),
                optax.scale(-0.1),
                contrib().keep_param_norm(views),
            ),
            viewed(),
        ),
    )
    measured = functools.partial(contrib().with_metrics, scale_by_muon(**by_views), views)
    of("views, with_metrics", viewed, measured)

    def clipped() -> Any:
        params = {"attention": {"query": normal(0, (16, 16)), "key": normal(1, (16, 8))}}
        half = ((4, 0.5),)
        heads = {
            "query$": contrib().QueryHeads(half, key_heads=2),
            "key$": contrib().KeyHeads(half),
        }
        logits = {"attention": jnp.array([0.5, 2.0, 300.0, jnp.inf])}
        transform = optax.chain(muon(0.02), contrib().qk_clip(1.0, heads))
        return updates_of(transform, params, max_logits=logits)

    def injected(*args: Any, static: tuple[str, ...] = (), **kwargs: Any) -> Any:
        made = optax.inject_hyperparams(muon, static_args=static)(*args, **kwargs)
        return updates_of(made, parameters())

    def ensemble() -> Any:
        transform = scale_by_muon()
        x = normal(0, (3, 16, 24))
        return jax.jit(jax.vmap(lambda x: transform.update(x, transform.init(x))))(x)

    def converted() -> Any:
        _, state = updates_of(muon(0.02), parameters())
        convert = contrib().convert_momentum
        return convert(state, source="bias_corrected", target="heavy_ball", beta=0.95)

    add("update, qk_clip", clipped)
    given = iteration((3.0, -3.0, 1.0), dtype="float32")
    add("update, injected", injected, 0.02, ns_steps=3, **given)
    add("update, injected, a table", injected, 0.02, ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5)))
    add("update, injected, dion", injected, 0.02, "dion", beta=0.9, eps=0.5, weight_decay=0.1)
    gram = iteration(method="gram")
    add("update, injected, static steps", injected, 0.02, static=("ns_steps",), **gram)
    add("update, vmap", ensemble)
    add("update, converted momentum", converted)


# ------------------------------------------------------------------------------ several devices


def define_sharded() -> None:
    """Adds the configurations of optimizers on eight devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from muon_jax import MuonDimensionNumbers, Split, muon, newton_schulz, scale_by_muon

    if len(jax.devices()) < 8:
        print(f"no sharded configurations: {len(jax.devices())} devices, not 8", file=sys.stderr)
        return

    meshes = {"fsdp": ((8,), ("x",)), "both": ((4, 2), ("x", "y"))}
    shapes = {"a": (16, 24), "b": (24, 16), "c": (16, 24), "wide": (2, 16, 64), "fused": (16, 48)}
    views = dict.fromkeys(shapes, MuonDimensionNumbers(-2, -1)) | {"fused": Split(-1, (24, 24))}
    layouts = {
        "fsdp": {"a": P("x"), "b": P(None, "x"), "c": P(), "wide": P(None, None, "x")},
        "both": {"a": P("x", "y"), "b": P("x"), "c": P("y"), "wide": P("y", None, "x")},
    }
    layouts["fsdp"]["fused"], layouts["both"]["fused"] = P("x"), P(("x", "y"))
    auto, explicit = AxisType.Auto, AxisType.Explicit

    def mesh_of(mesh: str, kind: AxisType = auto) -> Any:
        sizes, names = meshes[mesh]
        return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))

    def placed(mesh: str, kind: AxisType = auto, names: Any = shapes, dtype: Any = "f4") -> Any:
        where = mesh_of(mesh, kind)
        return {
            name: jax.device_put(
                normal(i, shapes[name], dtype), NamedSharding(where, layouts[mesh][name])
            )
            for i, name in enumerate(names)
        }

    def sharded(
        name: str,
        mesh: str,
        kind: AxisType,
        make: Any = scale_by_muon,
        names: Any = shapes,
        **kwargs: Any,
    ) -> None:
        key = "weight_dimension_numbers" if make is scale_by_muon else ""
        kwargs |= {key or "muon_weight_dimension_numbers": {name: views[name] for name in names}}
        title = f"sharded, {mesh}, {kind.name}, {name}"
        add(title, lambda: updates_of(make(**kwargs), placed(mesh, kind, names)))

    at = functools.partial(functools.partial, optimizer, 0.02)
    for mesh in meshes:
        for kind in (auto, explicit):
            sharded("plain", mesh, kind)
    sharded("muon", "fsdp", auto, at(), weight_decay=0.1)
    sharded("muon, NorMuon", "both", auto, at(), normuon_b2=0.9)
    sharded("muon, nanogpt", "fsdp", explicit, at(), preset="nanogpt")
    sharded("shardings=", "fsdp", auto, shardings=layouts["fsdp"])
    sharded("shardings=", "both", explicit, shardings=layouts["both"])
    kept = exchanged(**IN_GRAM_FORM)
    sharded("kept sharded", "fsdp", auto, **kept)
    sharded("exchanged whole", "fsdp", auto, **exchanged(**EXCHANGED_WHOLE))
    sharded("kept sharded", "both", explicit, **kept)
    sharded("kept sharded, aol", "fsdp", auto, **kept, ns_coeffs="aol", preconditioning="aol")
    for name in ("balanced", "accurate", "polar_express"):
        sharded(f"{name}, kept sharded", "both", auto, **kept, ns_coeffs=name)
    over_y = functools.partial(exchanged, exchange_axes="x")
    gram = {"names": ("a", "b"), **over_y({"y": "gram"}, outside="gram")}
    for kind in (auto, explicit):
        sharded("blocks", "both", kind, names=("a", "b"), **over_y({"y": "block"}, outside="block"))
        sharded("gram over y", "both", kind, **gram)
        sharded("split", "both", kind, **exchanged("split", outside="split"))
        sharded("repeat", "both", kind, **exchanged("repeat", outside="repeat"))
    sharded("balanced", "fsdp", auto, ns_coeffs="balanced")
    sharded("adaptive", "both", auto, adaptive=True, **iteration(dtype="float32"))
    sharded("groups of 4096 bytes", "fsdp", auto, **iteration(max_group_bytes=4096))
    sharded("each by itself", "both", explicit, **iteration(max_group_bytes=0))
    rounding = {"mu_dtype": "bfloat16", "mu_rounding": "stochastic"}
    sharded("stochastic rounding", "fsdp", auto, **rounding)

    def in_shard_map(mesh: str, make: Any = scale_by_muon, said: Any = None, **kwargs: Any) -> Any:
        specs = layouts[mesh]
        key = "weight_dimension_numbers" if make is scale_by_muon else ""
        kwargs |= {key or "muon_weight_dimension_numbers": views}
        kwargs |= exchanged(shardings=specs, **(said or {}))
        transform = make(**kwargs)

        def momentum_and_update(gradients: Any) -> Any:
            updates, state = transform.update(gradients, transform.init(gradients), gradients)
            return updates, getattr(state, "mu", updates)

        run = jax.shard_map(
            momentum_and_update,
            mesh=mesh_of(mesh),
            in_specs=(specs,),
            out_specs=(specs, specs),
            check_vma=False,
        )
        return jax.jit(run)(placed(mesh))

    for mesh in meshes:
        add(f"sharded, {mesh}, shard_map, plain", in_shard_map, mesh)
    add("sharded, fsdp, shard_map, stochastic rounding", in_shard_map, "fsdp", **rounding)
    add("sharded, both, shard_map, balanced", in_shard_map, "both", ns_coeffs="balanced")
    add("sharded, fsdp, shard_map, kept sharded", in_shard_map, "fsdp", said=IN_GRAM_FORM)
    add("sharded, both, shard_map, muon", in_shard_map, "both", at(), normuon_b2=0.9)

    def ensemble(mesh: str, kind: AxisType, spec: P, **kwargs: Any) -> Any:
        transform = scale_by_muon(**kwargs)
        x = jax.device_put(normal(0, (8, 16, 64)), NamedSharding(mesh_of(mesh, kind), spec))
        return jax.jit(jax.vmap(lambda x: transform.update(x, transform.init(x))))(x)

    add("sharded, vmap, matrices sharded", ensemble, "fsdp", auto, P(None, "x"))
    add("sharded, vmap, members sharded", ensemble, "fsdp", auto, P("x"))
    add("sharded, vmap, kept sharded", ensemble, "both", auto, P(None, None, "x"), **kept)
    add("sharded, vmap, explicit", ensemble, "fsdp", explicit, P(None, "x"))

    def iterated() -> Any:
        x = jax.device_put(normal(0, (8, 16, 24)), NamedSharding(mesh_of("both", explicit), P("x")))
        return newton_schulz(x)

    def eager() -> Any:
        transform = scale_by_muon(weight_dimension_numbers=views)
        return updates_of(transform, placed("fsdp"), jitted=False)

    def measured() -> Any:
        transform = scale_by_muon(weight_dimension_numbers=views)
        return updates_of(contrib().with_metrics(transform, views), placed("both"))

    def injected() -> Any:
        import optax

        given = iteration((3.0, -3.0, 1.0), dtype="float32")
        made = optax.inject_hyperparams(muon)(1e-2, ns_steps=3, **given)
        return updates_of(made, placed("fsdp", names=("a", "b", "c")))

    def differentiated() -> Any:
        transform = scale_by_muon(ns_steps=2, **kept, **iteration(implementation="xla"))

        def loss(gradients: Any) -> Any:
            updates, _ = transform.update(gradients, transform.init(gradients))
            return sum(jnp.sum(x**3) for x in jax.tree.leaves(updates))

        return jax.jit(jax.grad(loss))(placed("fsdp", explicit, ("a", "b", "c")))

    def in_bfloat16() -> Any:
        transform = scale_by_muon(weight_dimension_numbers=views)
        return updates_of(transform, placed("both", dtype=jnp.bfloat16))

    add("sharded, newton_schulz, explicit", iterated)
    add("sharded, fsdp, Auto, eager", eager)
    add("sharded, both, Auto, with_metrics", measured)
    add("sharded, fsdp, Auto, injected", injected)
    add("sharded, fsdp, Explicit, gradient", differentiated)
    add("sharded, both, Auto, bfloat16", in_bfloat16)


# ------------------------------------------------------------------------------ kernels


def define_kernels() -> None:
    """Adds the configurations of every implementation on a GPU."""
    import jax.numpy as jnp

    from muon_jax import newton_schulz

    schedules: dict[str, dict[str, Any]] = {
        "standard": {},
        "gram": {"method": "gram"},
        "balanced": {"ns_coeffs": "balanced"},
        "fast": {"ns_coeffs": "fast"},
        "accurate": {"ns_coeffs": "accurate"},
    }
    shapes = ((256, 256), (512, 1024), (24, 128, 256), (896, 896), (1024, 4096))
    for name, kwargs in schedules.items():
        for implementation in ("xla", "triton", "mosaic_gpu", None):
            for shape in shapes:
                title = f"kernels, {name}, {implementation}, {'x'.join(map(str, shape))}"
                compute = functools.partial(newton_schulz, implementation=implementation, **kwargs)
                add(title, lambda f=compute, s=shape: f(normal(0, s, jnp.bfloat16)))


if __name__ == "__main__":
    sys.exit(main())
