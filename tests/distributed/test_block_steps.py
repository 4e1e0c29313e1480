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
from test_exchange_axes import (
    BLOCKS,
    COLLECTIVE,
    FRONT_ENDS,
    MATRICES,
    SIZES,
    block_by_block,
    on_one_device,
)
from test_layouts import placed

from muon_jax import Split, explain, muon, scale_by_muon

# Cut along both sides, along a batch axis alone, and not at all.
TREE = {
    "up": BLOCKS["up"],
    "layers": ((4, 16, 24), ("fsdp",)),
    "whole": ((16, 32), ()),
}
KWARGS = {"ns_steps": 2, "ns_dtype": "float32"}


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


WORDS = {"exchange_axes": "fsdp", "outside": ("split", "block")}
CASES = [(front_end, words) for front_end in FRONT_ENDS for words in ({}, WORDS)]


@pytest.mark.parametrize("case", helpers.mostly_nightly(CASES, [CASES[0], CASES[-1]]), ids=str)
def test_every_third_step_is_of_whole_matrices_and_others_exchange_nothing(case):
    (axis_type, is_stated), words = case
    grads, specs, views = placed(SIZES, {key: TREE[key] for key in ("up", "whole")}, axis_type)
    kwargs = {**KWARGS, "weight_dimension_numbers": views}
    kwargs |= {"shardings": specs} if is_stated else {}
    compiled, found = steps(scale_by_muon(block_period=3, **words, **kwargs), grads, 5)
    counts, outside = collectives_of_branches(compiled)
    of_whole, whole = steps(scale_by_muon(**words, **kwargs), grads, 1)
    assert counts == (len(re.findall(COLLECTIVE, of_whole.as_text())), 0)
    assert counts[0] >= 2
    assert outside == 0
    _, blocks = steps(scale_by_muon(exchange_axes=(), outside="block", **kwargs), grads, 1)
    for t, updates in enumerate(found):
        helpers.assert_close(updates, blocks[0] if t % 3 else whole[0])
    assert np.abs(blocks[0]["up"] - whole[0]["up"]).max() > 0.1


@pytest.mark.parametrize("check_vma", helpers.mostly_nightly([True, False], [True]))
def test_inside_the_caller_s_shard_map(check_vma):
    grads, specs, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    kwargs = {**KWARGS, "weight_dimension_numbers": views, "momentum": "ema"}
    transform = scale_by_muon(shardings=specs, block_period=2, **kwargs)

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
    whole = on_one_device(grads, views, momentum="ema")
    blocks = block_by_block(on_one_device, grads, specs, views, SIZES, ["fsdp", "tp"])
    helpers.assert_close(run(grads, jnp.array(4)), whole)
    helpers.assert_close(run(grads, jnp.array(5)), blocks)


def of_muon(grads, views, count=2, **kwargs):
    optimizer = muon(muon_weight_dimension_numbers=views, **{**KWARGS, **kwargs})
    return steps(optimizer, grads, count, grads)


def fading(rate):
    return optax.linear_schedule(rate, 0.0, 3)


@pytest.mark.parametrize("schedules", helpers.mostly_nightly([True, False], [True]))
def test_blocks_alone_have_the_rate_of_blocks_and_the_scale_of_their_shape(schedules):
    """Where the learning rate is 0, at step 3, nothing moves."""
    grads, specs, views = placed(SIZES, TREE, AxisType.Auto)
    of = fading if schedules else float
    scale = {"consistent_rms": 0.2, "weight_decay": 0.5, "momentum": "ema", "nesterov": False}
    _, found = of_muon(
        *(grads, views, 4), learning_rate=of(0.3), block_learning_rate=of(0.1), block_period=4,
        **scale,
    )  # fmt: skip
    rate = [0.3 * (1 - t / 3) if schedules else 0.3 for t in range(4)]

    def direction(grads, views):
        """s·O, of rate 1: the momentum of equal gradients has their direction."""
        local = {key: jnp.asarray(np.asarray(grad)) for key, grad in grads.items()}
        kwargs = {**scale, "weight_decay": 0.0, "learning_rate": 1.0}
        return of_muon(local, views, 1, **kwargs)[1][0]

    whole = direction(grads, views)
    blocks = block_by_block(direction, grads, specs, views, SIZES, ["fsdp", "tp"])
    for t, updates in enumerate(found):
        for key in TREE:
            is_block = t > 0 and key == "up"
            own = blocks[key] / 3 if is_block else whole[key]
            expected = rate[t] * (own - 0.5 * np.asarray(grads[key]))
            np.testing.assert_allclose(updates[key], expected, atol=2e-5, err_msg=key)
    if schedules:
        assert not any(update.any() for update in found[3].values())


def test_matrices_that_are_whole_on_each_device_do_not_depend_on_the_period():
    parameters = {key: TREE[key] for key in ("layers", "whole")}
    grads, _, views = placed(SIZES, parameters, AxisType.Auto)
    on_one = {key: jnp.asarray(np.asarray(grad)) for key, grad in grads.items()}
    every = {"learning_rate": 0.1, "consistent_rms": 0.2}
    assert_same_without(grads, views, {"block_period": 2, "block_learning_rate": 0.01}, every)
    assert_same_without(on_one, views, {"block_period": 2, "block_learning_rate": 0.01}, every)


@helpers.nightly
def test_a_period_of_one_is_none():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    assert_same_without(grads, views, {"block_period": 1}, {"learning_rate": 0.1})


def assert_same_without(grads, views, period, kwargs):
    """Updates have no condition, and the bits of those without these arguments."""
    compiled, found = of_muon(grads, views, **period, **kwargs)
    assert " conditional(" not in compiled.as_text()
    chex.assert_trees_all_equal(found, of_muon(grads, views, **kwargs)[1])


@helpers.nightly
def test_the_period_is_static_and_rates_may_be_injected():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    rates = {"learning_rate": 0.3, "block_learning_rate": 0.1, "block_period": 2}
    injected = optax.inject_hyperparams(muon, static_args="block_period")(
        muon_weight_dimension_numbers=views, **KWARGS, **rates
    )
    _, found = steps(injected, grads, 2, grads)
    _, expected = of_muon(grads, views, **rates)
    chex.assert_trees_all_close(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="give it static_args='block_period'"):
        optax.inject_hyperparams(muon)(**rates).init(grads)


@helpers.nightly
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_under_vmap(axis_type):
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, axis_type)
    optimizer = scale_by_muon(block_period=2, weight_dimension_numbers=views, **KWARGS)

    def second(grads):
        state = optimizer.update(grads, optimizer.init(grads))[1]
        return optimizer.update(grads, state)[0]

    several = {"up": jnp.stack([grads["up"], 2 * grads["up"]])}
    found = jax.jit(jax.vmap(second))(several)["up"]
    expected = jax.jit(second)(grads)["up"]
    helpers.assert_close({"up": found[0], "twice": found[1]}, {"up": expected, "twice": expected})


def test_a_derivative_that_would_leave_blocks_to_xla_is_refused():
    grads, _, views = placed(SIZES, {"up": TREE["up"]}, AxisType.Auto)
    optimizer = scale_by_muon(block_period=2, weight_dimension_numbers=views, **KWARGS)

    def loss(grads):
        return optimizer.update(grads, optimizer.init(grads))[0]["up"].sum()

    with pytest.raises(NotImplementedError, match="block_period= has no blocks under derivatives"):
        jax.jit(jax.grad(loss))(grads)


MESH = AbstractMesh((2, 4), ("fsdp", "tp"))


def explained(view=MATRICES, **kwargs):
    params = {"w": jax.ShapeDtypeStruct((8, 1024, 4096), jnp.float32)}
    specs = PartitionSpec(None, "fsdp", "tp")
    return explain(params, specs, MESH, muon_weight_dimension_numbers={"w": view}, **kwargs)


def test_explain_has_the_mean_of_a_period():
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
    with pytest.raises(ValueError, match=r"takes axis 2 apart, .*, without block_period"):
        explained(Split(-1, (1024, 3072)), block_period=4)
