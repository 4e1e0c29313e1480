"""The table of what is orthogonalized where, from shapes alone."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from muon_jax import Exchange, MuonDimensionNumbers, NewtonSchulz, Split, describe

MESH = AbstractMesh((8, 2), ("fsdp", "ep"))


def shapes(**parameters):
    return {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in parameters.items()}


def test_a_model(capsys):
    params = shapes(
        **{f"q {i}": (1024, 1024) for i in range(9)},
        up=(6, 1024, 4096),
        down=(6, 4096, 1024),
        experts=(4, 512, 512),
        bias=(1024,),
    )
    specs = {name: PartitionSpec("fsdp") for name in params}
    specs |= {"up": PartitionSpec(None, "fsdp"), "down": PartitionSpec(None, None, "fsdp")}
    specs["experts"] = PartitionSpec("ep")
    views = {name: MuonDimensionNumbers(-2, -1) for name in params} | {"bias": None}
    arguments = {"ns_coeffs": NewtonSchulz(method="standard")}
    exchange = Exchange("repeat", shardings=specs)
    description = describe(params, exchange, MESH, muon_weight_dimension_numbers=views, **arguments)
    result = description.exchanges
    assert result is not None
    by_shape = {group.matrices[0]: group for group in result.groups}
    experts = by_shape[1, 512, 512]
    assert (experts.mode, experts.count, experts.each, experts.megabytes) == ("local", 2, 2, 0)
    q = by_shape[1, 1024, 1024]
    assert (q.mode, q.count, q.owners, q.each) == ("exchange over fsdp", 9, 8, 2)
    assert q.padding == 7 / 16 and q.dtype == "bfloat16"
    assert q.megabytes == 2 * (2 * 1024**2 * 2 * 7 / 8) / 1e6
    wide = by_shape[1, 1024, 4096]
    assert (wide.count, wide.owners, wide.each, wide.padding) == (12, 8, 2, 0.25)
    assert result.buckets == 1
    assert wide.microseconds > 2 * q.microseconds > 0
    assert result.exchange_microseconds == pytest.approx(40 + (q.megabytes + wide.megabytes) * 4)
    assert capsys.readouterr().out == f"{description}\n"
    assert "1024×4096  standard      exchange over fsdp  12     8       2     25%" in str(result)


def test_shardings_of_the_arguments_are_taken():
    sharding = NamedSharding(MESH, PartitionSpec("fsdp"))
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)}
    params["b"] = jax.ShapeDtypeStruct((64,), jnp.float32)
    (group,) = helpers.exchanges(params, ns_coeffs="balanced").groups
    assert (group.owners, group.each, group.dtype) == (8, 1, "float16")
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(64, 64\), .*none: pass shardings="):
        describe(shapes(w=(64, 64)), mesh=MESH)


def test_arrays_of_no_mesh_exchange_nothing_and_traced_ones_on_a_mesh_are_refused():
    for x in (np.ones((8, 8), np.float32), jnp.ones((8, 8))):
        assert describe({"w": x}).exchanges is None
    with pytest.raises(ValueError, match="shardings of traced arrays: pass shardings="):
        jax.eval_shape(lambda x: describe({"w": x}, mesh=MESH) and x, jnp.ones((8, 8)))


def test_a_part_cannot_be_left_to_adamw():
    views = {"w": Split(1, (32, 32), (MuonDimensionNumbers(), None))}
    with pytest.raises(
        ValueError, match=r"\['w'\] of shape \(64, 64\): a view must be .* got None"
    ):
        helpers.exchanges(
            shapes(w=(64, 64)), PartitionSpec("fsdp"), MESH, muon_weight_dimension_numbers=views
        )


def test_a_mesh_is_needed():
    with pytest.raises(ValueError, match=r"got P\('fsdp',\) and no mesh: pass mesh="):
        helpers.exchanges(shapes(w=(64, 64)), PartitionSpec("fsdp"))
    with jax.sharding.use_abstract_mesh(MESH):
        in_force = helpers.exchanges(shapes(w=(64, 64)), PartitionSpec("fsdp"))
    assert in_force == helpers.exchanges(shapes(w=(64, 64)), PartitionSpec("fsdp"), MESH)


def test_shards_are_refused():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("fsdp")

    def explained(x):
        helpers.exchanges({"w": jax.ShapeDtypeStruct(x.shape, x.dtype)}, spec)
        return x

    run = jax.shard_map(explained, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="got shards: call it outside of shard_map"):
        run(jnp.ones((64, 64)))


def test_numbers_of_python_are_parameters(capsys):
    """`init` takes them, for AdamW."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    result = helpers.exchanges({"temperature": 1.0, "kernel": jnp.ones((8, 8))}, mesh=mesh)
    (group,) = result.groups
    assert group.count == 1
    capsys.readouterr()
