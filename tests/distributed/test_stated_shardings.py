"""Shardings that contradict those of the parameters warn; names of axes are checked in tracing."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import Exchange, Link, NewtonSchulz, muon, scale_by_muon
from muon_jax._distributed import automatic

P = PartitionSpec


def _sharded(spec):
    mesh = jax.make_mesh((4, 2, 1), ("fsdp", "tensor", "one"), (AxisType.Auto,) * 3)
    return {"w": jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, spec))}


@pytest.mark.parametrize(
    ("own", "stated"),
    [
        (P("fsdp"), P()),
        (P("fsdp", "tensor"), P("fsdp")),
        (P("fsdp"), P(None, "fsdp")),
        (P(), P("tensor")),
        (P(("fsdp", "tensor")), P(("tensor", "fsdp"))),
    ],
)
def test_a_stated_sharding_that_is_not_the_parameters_warns(own, stated):
    with pytest.warns(UserWarning, match=r"\['w'\], but the array is sharded as"):
        scale_by_muon(shardings=stated).init(_sharded(own))


@pytest.mark.parametrize(
    ("own", "stated"),
    [(P("fsdp"), P("fsdp", None)), (P("fsdp", "one"), P("fsdp")), (P(), None), (P("one"), P())],
)
def test_a_stated_sharding_that_is_the_parameters_does_not_warn(own, stated):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_by_muon(shardings=stated).init(_sharded(own))


def test_the_warning_names_the_parameter_that_differs():
    params = {"v": _sharded(P("fsdp"))["w"], "w": _sharded(P("tensor"))["w"]}
    with pytest.warns(UserWarning, match=r"says .*None.* for the parameter \['w'\].* as .*tensor"):
        muon(0.1, shardings={"v": P("fsdp"), "w": P(None, "tensor")}).init(params)


@pytest.mark.parametrize(
    "stated",
    [
        {"a": P("fsdp"), "b": None},
        {"a": {"w": P("fsdp", None)}, "b": {"w": P()}},
        lambda tree: jax.tree.map(lambda x: x.sharding, tree),
        lambda tree: {"a": P("fsdp"), "b": None},
    ],
)
def test_trees_and_functions_that_say_what_the_parameters_are_do_not_warn(stated):
    params = {"a": _sharded(P("fsdp")), "b": _sharded(P())}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_by_muon(shardings=stated).init(params)


@pytest.mark.parametrize("where", ["one device", "no mesh", "jit", "shard_map", "explicit"])
def test_where_nothing_is_known_to_differ_nothing_warns(where):
    params = _sharded(P("fsdp"))
    transform = scale_by_muon(shardings=P() if where == "shard_map" else P("tensor"))
    init = transform.init
    if where == "one device":
        mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
        params = jax.device_put({"w": jnp.ones((16, 32))}, NamedSharding(mesh, P("fsdp")))
    elif where == "no mesh":
        params = {"w": jnp.ones((16, 32))}
    elif where == "jit":
        init = jax.jit(init)
    elif where == "shard_map":
        mesh = params["w"].sharding.mesh
        init = jax.shard_map(init, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    else:
        mesh = jax.make_mesh((8,), ("tensor",), (AxisType.Explicit,))
        params = jax.device_put({"w": jnp.ones((16, 32))}, NamedSharding(mesh, P()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(params)


@pytest.mark.parametrize(
    "arguments",
    [
        {"axes": {"fdsp": "exchange"}},
        {"axes": {"datta": "split"}},
        {"links": {"nvlink": Link(1e9)}},
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_wrong_name_on_automatic_axes_is_one_sentence(arguments, jitted):
    params = _sharded(P("fsdp"))
    transform = scale_by_muon(shardings=Exchange(**arguments))
    state = transform.init(params)
    update = jax.jit(transform.update) if jitted else transform.update
    with pytest.raises(ValueError, match="must name axes of the mesh") as caught:
        update(params, state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [{"axes": {"fdsp": "exchange"}}, {"links": {"nvlink": Link()}}], ids=str
)
def test_the_mesh_in_force_says_which_names_are_wrong(arguments):
    """Neither the arrays nor their types name a mesh while this is traced."""
    transform = scale_by_muon(shardings=Exchange(**arguments))
    mesh = _sharded(P("fsdp"))["w"].sharding.mesh
    sharding = NamedSharding(mesh, P("fsdp"))
    step = jax.jit(lambda g: transform.update(g, transform.init(g))[0], in_shardings=sharding)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must name axes of the mesh"):
        step.lower({"w": jax.ShapeDtypeStruct((16, 32), jnp.float32)})


@pytest.mark.parametrize(
    ("axes", "method", "message"),
    [
        ({"fsdp": "raise"}, None, "over 'fsdp', where Exchange says 'raise'"),
        ("raise", None, "over 'fsdp', where Exchange says 'raise'"),
        ("gram_or_exchange", "standard", "no sharded matrix can stay sharded"),
        ({"fsdp": "gram"}, "standard", "its matrices cannot stay sharded"),
    ],
)
def test_what_only_the_compiler_finds_is_one_sentence_outside_jit(axes, method, message):
    params = _sharded(P("fsdp"))
    transform = scale_by_muon(NewtonSchulz(method=method), shardings=Exchange(axes))
    with pytest.raises(ValueError, match=message) as caught:
        transform.update(params, transform.init(params))
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
    transform = scale_by_muon()  # the next update is not affected
    transform.update(params, transform.init(params))


FLAG = "jax_remove_custom_partitioning_ptr_from_cache_key"


@pytest.fixture
def warned():
    """Runs a function without the flag, and returns how often it warned of the cache."""
    before = getattr(jax.config, FLAG), jax.config.jax_enable_compilation_cache

    def count(function, is_cached=True, flag=False):
        automatic._warn_of_cache.cache_clear()
        jax.config.update(FLAG, flag)
        jax.config.update("jax_enable_compilation_cache", is_cached)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
        return sum("compilation cache is on" in str(w.message) for w in caught)

    yield count
    jax.config.update(FLAG, before[0])
    jax.config.update("jax_enable_compilation_cache", before[1])
    automatic._warn_of_cache.cache_clear()


def _lowered_twice(params):
    transform = scale_by_muon()
    state = transform.init(params)
    for update in (transform.update, lambda g, s: transform.update(g, s)):
        jax.jit(update).lower(params, state)


def test_a_cache_that_never_hits_warns_once(warned):
    if not jax.config.jax_compilation_cache_dir:
        pytest.skip("this run has no folder for the cache")
    params = _sharded(P("fsdp"))
    assert warned(lambda: _lowered_twice(params)) == 1
    assert warned(lambda: _lowered_twice(params), flag=True) == 0
    assert warned(lambda: _lowered_twice(params), is_cached=False) == 0


def test_a_cache_that_hits_does_not_warn(warned):
    """Programs of one device, though there are eight, and of explicit axes."""
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Explicit,))
    one = jax.make_mesh((1,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:1])
    whole = {"w": jnp.ones((16, 32))}
    transform = scale_by_muon()
    for params in (
        whole,
        jax.device_put(whole, NamedSharding(one, P("fsdp"))),
        jax.device_put(whole, NamedSharding(mesh, P("fsdp"))),
    ):
        update = jax.jit(lambda g: transform.update(g, transform.init(g))[0])
        assert warned(lambda: jax.block_until_ready(update(params))) == 0  # noqa: B023


def test_a_mesh_that_only_the_compiler_knows_warns(warned):
    if not jax.config.jax_compilation_cache_dir:
        pytest.skip("this run has no folder for the cache")
    transform = scale_by_muon()
    sharding = _sharded(P("fsdp"))["w"].sharding
    update = jax.jit(lambda g: transform.update(g, transform.init(g))[0], in_shardings=sharding)
    whole = {"w": jnp.ones((16, 32))}
    assert warned(lambda: update.lower(whole).compile()) == 1
