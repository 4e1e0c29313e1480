"""A mixture of experts over several devices: each expert is orthogonalized where it lives.

    python examples/moe.py --mesh expert=4
    python examples/moe.py --mesh expert=2,fsdp=2 --method gram --optimizer muon adamw

A small transformer over bytes learns Python from the source of the standard library. Its experts
are stacks `(experts, in, out)`, divided among the devices of the mesh axis "expert"; the rows of
all matrices are divided over "fsdp". Before it trains it prints which parameters Muon takes for
matrices, and who orthogonalizes them: along "expert" nothing is exchanged. Without accelerators the
devices are simulated on the CPU.
"""

import argparse
import dataclasses
import math
import re
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import PRESETS, by_use, describe, muon

LAYERS, HEADS = 2, 4
CONTEXT, BATCH_SIZE = 64, 16
EXPERTS_PER_BYTE, CAPACITY_FACTOR = 2, 1.25
BALANCE = 0.01  # the weight of the load-balance loss
LEARNING_RATES = {"muon": 0.02, "adamw": 0.008}
AXES = ("expert", "fsdp")

type Params = nnx.State
type Shardings = Any  # a tree of `NamedSharding`s, as of the parameters


class Experts(nnx.Module):
    """Perceptrons with one hidden layer, in stacks of matrices."""

    def __init__(self, experts: int, width: int, rngs: nnx.Rngs):
        normal, hidden = rngs.params.normal, 2 * width
        self.up = nnx.Param(normal((experts, width, hidden)) / width**0.5)
        self.down = nnx.Param(normal((experts, hidden, width)) / hidden**0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps the slots of all experts, `(experts, batch, capacity, width)`."""
        hidden = nnx.gelu(jnp.einsum("ebcw,ewh->ebch", x, self.up[...]))
        return jnp.einsum("ebch,ehw->ebcw", hidden, self.down[...])


class MixtureOfExperts(nnx.Module):
    """Sends each byte to the experts that the router likes best, as long as they have room."""

    def __init__(self, experts: int, width: int, rngs: nnx.Rngs):
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.experts = Experts(experts, width, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `(batch, context, width)`; also returns the load-balance loss, 1 at its best.

        Each expert has `capacity` slots for each sequence, taken in the order of the bytes, so that
        none depends on a later one. A byte that finds no room passes unchanged.
        """
        batch, context, _ = x.shape
        probabilities = jax.nn.softmax(self.router(x))
        experts = probabilities.shape[-1]
        capacity = math.ceil(CAPACITY_FACTOR * EXPERTS_PER_BYTE * context / experts)
        weights, chosen = jax.lax.top_k(probabilities, EXPERTS_PER_BYTE)
        weights = weights / weights.sum(axis=-1, keepdims=True)

        sent = jax.nn.one_hot(chosen, experts, dtype=int)  # (batch, context, choices, experts)
        queue = sent.reshape(batch, -1, experts)
        position = (queue.cumsum(axis=1) - queue).reshape(sent.shape)
        slots = sent[..., None] * jax.nn.one_hot(position, capacity, dtype=x.dtype)
        combine = jnp.einsum("btk,btkec->btec", weights, slots)
        results = self.experts(jnp.einsum("btkec,btw->ebcw", slots, x))

        load = sent.mean(axis=(0, 1, 2))  # the part of all choices that each expert gets
        balance = experts * jnp.sum(load * probabilities.mean(axis=(0, 1)))
        return jnp.einsum("btec,ebcw->btw", combine, results), balance


class Block(nnx.Module):
    """Attention, then a mixture of experts, each on normalized bytes and added to them."""

    def __init__(self, experts: int, width: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, width, use_bias=False, decode=False, rngs=rngs
        )
        self.moe_norm = nnx.RMSNorm(width, rngs=rngs)
        self.moe = MixtureOfExperts(experts, width, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `(batch, context, width)`; also returns the load-balance loss."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        mixture, balance = self.moe(self.moe_norm(x))
        return x + mixture, balance


class Transformer(nnx.Module):
    """A transformer over bytes."""

    def __init__(self, experts: int, width: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal((CONTEXT, width)))
        self.blocks = nnx.List([Block(experts, width, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps bytes `(batch, context)` to logits of the next ones; also the load-balance loss."""
        x = self.embedding(text) + self.positions
        mask, balances = nnx.make_causal_mask(text), []
        for block in self.blocks:
            x, balance = block(x, mask)
            balances.append(balance)
        return self.head(self.norm(x)), jnp.stack(balances).mean()


def specs_of(params: Params) -> Params:
    """How parameters are divided: experts over "expert", rows of matrices over "fsdp"."""

    def spec(path, param):
        experts = ("expert",) if "'experts'" in jax.tree_util.keystr(path) else ()
        rows = ("fsdp",) if param.ndim > 1 else ()
        return PartitionSpec(*experts, *rows)

    return jax.tree.map_with_path(spec, params)


def make_optimizer(
    name: str, learning_rate: float, method: str | None, model: Transformer
) -> optax.GradientTransformation:
    """Either of the optimizers in `LEARNING_RATES`; both begin slowly."""
    schedule = optax.warmup_constant_schedule(0.0, learning_rate, 10)
    if name == "adamw":
        return optax.adamw(schedule, b2=0.95, weight_decay=0.01)
    return muon(schedule, **muon_arguments(method, model), shardings=specs_of(nnx.state(model)))


def muon_arguments(method: str | None, model: Transformer) -> dict[str, Any]:
    """Those of `muon` that `describe` needs, too."""
    graph, params = nnx.split(model)
    text = jax.ShapeDtypeStruct((BATCH_SIZE, CONTEXT), jnp.int32)
    routes = by_use(lambda params, text: nnx.merge(graph, params)(text), params, text)
    arguments = {"preset": "moe_fp16", "muon_weight_dimension_numbers": routes}
    if method:
        arguments["ns_coeffs"] = dataclasses.replace(
            PRESETS["moe_fp16"]["ns_coeffs"], method=method
        )
    return arguments


def batches(steps: int) -> Iterator[np.ndarray]:
    """Windows of the source of the standard library, `(batch, context + 1)`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(len(text) - CONTEXT, size=(BATCH_SIZE, 1))
        yield text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


def train(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, steps: int
) -> tuple[list[float], float]:
    """Trains on the mesh; returns each batch's cross-entropy in nats per byte, and seconds a step.

    Seconds are the median, from the batch to its loss on the host.
    """
    graph, params = nnx.split(model)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(params))
    params = jax.tree.map(jax.device_put, params, shardings)
    state = optimizer.init(params)

    def loss(params, windows):
        logits, balance = nnx.merge(graph, params)(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean() + BALANCE * balance, losses.mean()

    @jax.jit
    def step(params, state, windows):
        gradients, cross_entropy = jax.grad(loss, has_aux=True)(params, windows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, cross_entropy

    losses, seconds = [], []
    for windows in batches(steps):
        start = time.perf_counter()
        windows = jax.device_put(windows, NamedSharding(mesh, PartitionSpec(AXES)))
        params, state, cross_entropy = step(params, state, windows)
        losses.append(float(cross_entropy))
        seconds.append(time.perf_counter() - start)
    return losses, float(np.median(seconds))


def mesh_sizes(text: str) -> tuple[int, ...]:
    """The sizes of the axes `AXES` in a text such as `expert=2,fsdp=2`; 1 where not named."""
    if not re.fullmatch(r"(expert|fsdp)=[1-9]\d*(,(expert|fsdp)=[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"need sizes such as expert=2,fsdp=2, got {text!r}")
    sizes = dict(part.split("=") for part in text.split(","))
    return tuple(int(sizes.get(axis, 1)) for axis in AXES)


def main(words: Sequence[str] | None = None) -> None:
    """Says what Muon will do on the mesh, trains, and prints the losses."""
    parser = argparse.ArgumentParser(description="A mixture of experts, trained by Muon on a mesh.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help=f"a multiple of {HEADS}")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--mesh", type=mesh_sizes, default="expert=4", help="expert=2,fsdp=2")
    parser.add_argument("--optimizer", nargs="+", choices=LEARNING_RATES, default=["muon"])
    parser.add_argument("--learning-rate", type=float, help=f"default: {LEARNING_RATES}")
    parser.add_argument("--method", choices=["standard", "gram"], help="form of the iteration")
    args = parser.parse_args(words)
    expert, fsdp = args.mesh
    if args.steps < 1 or args.width < HEADS or args.width % math.lcm(HEADS, fsdp):
        parser.error(f"need --steps 1 and --width a multiple of {HEADS} and of fsdp={fsdp}")
    if args.experts < EXPERTS_PER_BYTE or args.experts % expert or BATCH_SIZE % (expert * fsdp):
        parser.error(
            f"--experts must be at least {EXPERTS_PER_BYTE} and a multiple of expert={expert}, got"
            f" {args.experts}; devices must divide a batch of {BATCH_SIZE}, got {expert * fsdp}"
        )
    if jax.config.jax_num_cpu_devices < expert * fsdp:
        jax.config.update("jax_num_cpu_devices", expert * fsdp)  # used where there are no others
    if len(jax.devices()) < expert * fsdp:
        parser.error(
            f"--mesh needs {expert * fsdp} devices, got {jax.devices()}: set JAX_PLATFORMS=cpu to"
            " have them simulated"
        )
    devices = jax.devices()[: expert * fsdp]
    mesh = jax.make_mesh(args.mesh, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)

    model = Transformer(args.experts, args.width, nnx.Rngs(0))
    params = nnx.state(model)
    arguments = muon_arguments(args.method, model)
    describe(params, specs_of(params), mesh, **arguments)
    print(f"\nLoss in nats per byte, on {len(devices)} devices ({devices[0].platform}):")
    for name in args.optimizer:
        learning_rate = args.learning_rate
        if learning_rate is None:
            learning_rate = LEARNING_RATES[name]
        optimizer = make_optimizer(name, learning_rate, args.method, model)
        losses, seconds = train(model, optimizer, mesh, args.steps)
        shown = np.linspace(0, args.steps - 1, min(args.steps, 6)).astype(int)
        columns = [f"{step + 1}: {losses[step]:.3f}" for step in shown]
        print(f"{name:5}", *columns, f"({1e3 * seconds:.1f} ms a step)", sep="  ")


if __name__ == "__main__":
    main()
