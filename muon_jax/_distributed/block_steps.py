"""Block steps: between steps of whole matrices, each device orthogonalizes its own blocks.

`MuonBP <https://arxiv.org/abs/2510.16981>`_. With period P, step t = 0, 1, … is

    t mod P = 0   of whole matrices, as without a period,
    otherwise     of blocks: what a device has of a matrix is a matrix. Nothing is exchanged.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax._distributed.exchange import run_plan
from muon_jax._distributed.exchange_axes import ExchangeAxes
from muon_jax._distributed.plan import Plan
from muon_jax._distributed.planning import Limits
from muon_jax._iteration.newton_schulz import NewtonSchulz


class BlockStep(NamedTuple):
    """What a step is, under a period.

    Attributes:
        is_of_blocks: whether it is a block step.
        gain: what the updates of blocks are multiplied by then.
    """

    is_of_blocks: jax.Array
    gain: jax.typing.ArrayLike


def block_step(
    period: int | None, gain: optax.ScalarOrSchedule, count: jax.Array
) -> BlockStep | None:
    """Returns what step `count` = 0, 1, … is; None where all steps are of whole matrices."""
    if period is None or period == 1:
        return None
    return BlockStep(count % int(period) != 0, gain(count) if callable(gain) else gain)


def limits_of_blocks(limits: Limits) -> Limits:
    """Returns the limits of block steps, which exchange nothing."""
    return limits._replace(exchange_axes=ExchangeAxes.of_arguments((), "block"))


def run_either(
    step: BlockStep,
    whole: Plan,
    blocks: Plan,
    shards: Sequence[jax.Array],
    iterations: Sequence[NewtonSchulz],
) -> list[jax.Array]:
    """Returns the results of one of two plans, as `run_plan`.

    The gain is that of parameters which block steps cut further than steps of whole matrices do.

    Args:
        step: decides which, by the same value on all devices.
        whole: the plan of whole matrices.
        blocks: the plan of block steps.
        shards: the local part of each parameter.
        iterations: with which the plans were made.
    """
    cuts = [{leaf.index: leaf.blocks for leaf in plan.leaves} for plan in (whole, blocks)]

    def of_plan(plan: Plan) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        return lambda shards: run_plan(plan, shards, iterations)

    def with_gain(i: int, x: jax.Array) -> jax.Array:
        if cuts[0][i] == cuts[1][i]:
            return x
        gain = jnp.asarray(step.gain, jnp.promote_types(x.dtype, jnp.float32))
        return (x * gain).astype(x.dtype)

    def of_blocks(shards: Sequence[jax.Array]) -> list[jax.Array]:
        return [with_gain(i, x) for i, x in enumerate(of_plan(blocks)(shards))]

    if whole == blocks:
        return of_plan(whole)(shards)
    return jax.lax.cond(step.is_of_blocks, of_blocks, of_plan(whole), [*shards])
