"""Block-periodic Muon: whole matrices in every P-th step, blocks and no exchange in between."""

import re

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from test_layouts import placed
from test_words import COLLECTIVE, FRONT_ENDS, MATRICES, SIZES

from muon_jax import Exchange, NewtonSchulz, Split, muon, newton_schulz, scale_by_muon

# Cut along both sides, along a batch axis alone, and not at all.
TREE = {
    "up": ((16, 32), ("fsdp", "tp")),
    "layers": ((4, 16, 24), ("fsdp",)),
    "whole": ((16, 32), ()),
}
KWARGS = {"ns_steps": 2, "ns_coeffs": NewtonSchulz(dtype="float32")}


def steps(optimizer, grads, count=3, params=None):
    """The compiled update, the updates of `count` steps with the same gradients."""
    state, found = optimizer.init(grads), []
    compiled = jax.jit(optimizer.update).lower(grads, state, params).compile()
    for _ in range(count):
        updates, state = compiled(grads, state, params)
        found.append(jax.tree.map(np.asarray, updates))
    return compiled, found


def collectives_of_branches(compiled):
    """How many collectives each branch of the only conditional has, and the rest of the program."""
    computations, name = {}, None
    for line in compiled.as_text().splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = header[1]
        computations.setdefault(name, []).append(line)

    def count(name):
        """Of a computation, with all that it calls."""
        lines = computations[name]
        called = re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)", "\n".join(lines))
        return sum(bool(re.search(COLLECTIVE, x)) for x in lines) + sum(map(count, called))

    text = compiled.as_text()
    branches = [
        re.findall(r"[\w.\-]+", stated)
        for stated in re.findall(r" conditional\(.*branch_computations=\{(.*?)\}", text)
    ]
    branches += re.findall(r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)", text)
    (names,) = branches
    counts = tuple(map(count, names))
    return counts, len(re.findall(COLLECTIVE, text)) - sum(counts)


def orthogonal(grads, cuts=(1, 1)):
    """The updates of gradients of which `up` is cut in so many blocks along rows and columns."""

    def blocks(x):
        rows, cols = (size // cut for size, cut in zip(x.shape, cuts, strict=True))
        grid = x.reshape(cuts[0], rows, cuts[1], cols).swapaxes(1, 2)
        done = newton_schulz(grid.reshape(-1, rows, cols), ns_steps=2, dtype="float32")
        return done.reshape(grid.shape).swapaxes(1, 2).reshape(x.shape)

    local = {key: jnp.asarray(np.asarray(grad)) for key, grad in grads.items()}
    whole = {key: newton_schulz(x, ns_steps=2, dtype="float32") for key, x in local.items()}
    return whole | {"up": blocks(local["up"])}


# What exchanges over fsdp, the rows, leaves of a matrix: blocks of columns.
WORDS = {"tp": ("block", "split"), ...: "split"}
CASES = [(front_end, words) for front_end in FRONT_ENDS for words in ((), WORDS)]


@pytest.mark.parametrize("case", helpers.mostly_nightly(CASES, CASES[:1]), ids=str)
def test_every_third_step_is_of_whole_matrices_and_others_exchange_nothing(case):
    (axis_type, is_stated), words = case
    grads, specs, views = placed(SIZES, {key: TREE[key] for key in ("up", "whole")}, axis_type)
    exchange = Exchange(words, shardings=specs if is_stated else None, block_period=3)
    kwargs = {**KWARGS, "weight_dimension_numbers": views, "shardings": exchange}
    compiled, found = steps(scale_by_muon(**kwargs), grads, 5)
    (of_whole, of_blocks), outside = collectives_of_branches(compiled)
    assert (of_blocks, outside) == (0, 0)
    assert of_whole >= 3 if words else of_whole == 2  # replicas that split the work gather it
    whole, blocks = orthogonal(grads, (1, 2) if words else (1, 1)), orthogonal(grads, (2, 2))
    for t, updates in enumerate(found):
        helpers.assert_close(updates, blocks if t % 3 else whole)
    assert np.abs(blocks["up"] - whole["up"]).max() > 0.1


@pytest.mark.parametrize("check_vma", helpers.mostly_nightly([True, False], [True]))
def test_inside_the_caller_s_shard_map(check_vma):
    grads, specs, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    exchange = Exchange(shardings=specs, block_period=2)
    kwargs = {**KWARGS, "weight_dimension_numbers": views, "shardings": exchange}
    transform = scale_by_muon(momentum="ema", **kwargs)

    def update(grads, count):
        return transform.update(grads, transform.init(grads)._replace(count=count))[0]

    run = jax.shard_map(
        update,
        mesh=jax.typeof(grads["up"]).sharding.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=check_vma,
    )
    run = jax.jit(run).lower(grads, jnp.array(0)).compile()
    assert collectives_of_branches(run) == ((2, 0), 0)
    helpers.assert_close(run(grads, jnp.array(4)), orthogonal(grads))
    helpers.assert_close(run(grads, jnp.array(5)), orthogonal(grads, (2, 2)))


def of_muon(grads, views, count=2, **kwargs):
    optimizer = muon(muon_weight_dimension_numbers=views, **{**KWARGS, **kwargs})
    return steps(optimizer, grads, count, grads)


def fading(rate):
    return optax.linear_schedule(rate, 0.0, 3)


@pytest.mark.parametrize("schedules", helpers.mostly_nightly([True, False], [True]))
def test_blocks_alone_have_the_rate_of_blocks_and_the_scale_of_their_shape(schedules):
    """Where the learning rate is 0, at step 3, nothing moves."""
    grads, _, views = placed(SIZES, {key: TREE[key] for key in ("up", "whole")}, AxisType.Auto)
    of = fading if schedules else float
    gain = (lambda count: 1 / 3) if schedules else 1 / 3
    _, found = of_muon(
        *(grads, views, 4),
        learning_rate=of(0.3),
        shardings=Exchange(block_period=4, block_gain=gain),
        consistent_rms=0.2,
        weight_decay=0.5,
    )
    for t, updates in enumerate(found):
        rate = 0.3 * (1 - t / 3) if schedules else 0.3
        for key, o in orthogonal(grads, (2, 2) if t else (1, 1)).items():
            is_block = t > 0 and key == "up"  # of 8 rows and 16 columns
            scale = 0.2 * np.sqrt(16) / 3 if is_block else 0.2 * np.sqrt(32)
            expected = -rate * (scale * o + 0.5 * np.asarray(grads[key]))
            np.testing.assert_allclose(updates[key], expected, atol=2e-6, err_msg=key)
    if schedules:
        assert not any(update.any() for update in found[3].values())


def test_matrices_that_are_whole_on_each_device_do_not_depend_on_the_period():
    parameters = {key: TREE[key] for key in ("layers", "whole")}
    grads, _, views = placed(SIZES, parameters, AxisType.Auto)
    on_one = {key: jnp.asarray(np.asarray(grad)) for key, grad in grads.items()}
    period = Exchange(block_period=2, block_gain=0.1)
    for kept in ({"layers": grads["layers"]}, {"whole": on_one["whole"]}):
        assert_same_without(kept, {key: views[key] for key in kept}, period, {"learning_rate": 0.1})


@helpers.nightly
def test_a_period_of_one_is_none():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    assert_same_without(grads, views, Exchange(block_period=1), {"learning_rate": 0.1})


def assert_same_without(grads, views, period, kwargs):
    """Updates have no condition, and the bits of those without a period."""
    compiled, found = of_muon(grads, views, shardings=period, **kwargs)
    assert " conditional(" not in compiled.as_text()
    chex.assert_trees_all_equal(found, of_muon(grads, views, **kwargs)[1])


@helpers.nightly
def test_the_period_is_static_and_rates_may_be_injected():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)

    def made(learning_rate, block_gain):
        exchange = Exchange(block_period=2, block_gain=block_gain)
        given = {"muon_weight_dimension_numbers": views, "shardings": exchange}
        return muon(learning_rate, **given, **KWARGS)

    def periodic(learning_rate, block_period):
        return muon(learning_rate, shardings=Exchange(block_period=block_period))

    injected = optax.inject_hyperparams(made)(learning_rate=0.3, block_gain=1 / 3)
    _, found = steps(injected, grads, 2, grads)
    _, expected = steps(made(0.3, 1 / 3), grads, 2, grads)
    chex.assert_trees_all_close(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="give it static_args='block_period'"):
        optax.inject_hyperparams(periodic)(0.3, block_period=2).init(grads)


@helpers.nightly
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_under_vmap(axis_type):
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, axis_type)
    optimizer = scale_by_muon(
        shardings=Exchange(block_period=2), weight_dimension_numbers=views, **KWARGS
    )

    def second(grads):
        state = optimizer.update(grads, optimizer.init(grads))[1]
        return optimizer.update(grads, state)[0]

    several = {"up": jnp.stack([grads["up"], 2 * grads["up"]])}
    found = jax.jit(jax.vmap(second))(several)["up"]
    expected = jax.jit(second)(grads)["up"]
    helpers.assert_close({"up": found[0], "twice": found[1]}, {"up": expected, "twice": expected})


@pytest.mark.parametrize(
    ("kwargs", "argument"),
    [
        ({"block_period": 2}, "block_period"),
        ({"axes": "block"}, "'block'"),
        ({"axes": {"tp": "block"}}, "'block'"),
    ],
)
def test_a_derivative_that_would_leave_blocks_to_xla_is_refused(kwargs, argument):
    grads, specs, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    given = {"weight_dimension_numbers": views, **KWARGS}
    optimizer = scale_by_muon(shardings=Exchange(**kwargs), **given)

    def update(grads):
        return optimizer.update(grads, optimizer.init(grads))[0]["up"].sum()

    on_no_mesh = {"up": jnp.stack([np.asarray(grads["up"])] * 2)}
    for mapped, x in ((jax.grad(update), grads), (jax.vmap(update), on_no_mesh)):
        with pytest.raises(NotImplementedError, match=f"{argument} has no blocks under derivat"):
            jax.eval_shape(mapped, x)
    optimizer = scale_by_muon(shardings=Exchange(shardings=specs, **kwargs), **given)
    assert jax.eval_shape(jax.grad(update), grads)["up"].shape == grads["up"].shape


MESH = AbstractMesh((2, 4), ("fsdp", "tp"))


def explained(view=MATRICES, **kwargs):
    params = {"w": jax.ShapeDtypeStruct((8, 1024, 4096), jnp.float32)}
    exchange = Exchange(shardings=PartitionSpec(None, "fsdp", "tp"), **kwargs)
    return helpers.exchanges(params, exchange, MESH, muon_weight_dimension_numbers={"w": view})


def test_describe_has_the_mean_of_a_period():
    every, fourth = explained(), explained(block_period=4)
    assert fourth.groups == every.groups
    assert every.mean_megabytes == sum(group.megabytes for group in every.groups) > 0
    assert fourth.mean_megabytes == every.mean_megabytes / 4
    last = str(fourth).splitlines()[-1]
    assert last == (
        f"So is one step of 4; the others exchange nothing: in the mean"
        f" {fourth.mean_megabytes:.1f} MB a step"
    )
    assert "So is one step" not in str(every)


def test_blocks_of_parts_of_an_axis_are_refused():
    with pytest.raises(ValueError, match=r"takes axis 2 apart, .* and without block_period"):
        explained(Split(-1, (1024, 3072)), block_period=4)
