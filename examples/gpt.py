"""A GPT pretrained on source code with Muon, optax's Muon or AdamW, on one GPU or several.

    python examples/gpt.py                                   # small: minutes on two CPU cores
    python examples/gpt.py --size 128m --ns-coeffs balanced  # one large GPU
    python examples/gpt.py --size 128m --mesh fsdp=2,tensor=2 --checkpoint checkpoints
    python examples/gpt.py --mesh fsdp=8 --coordinator host0:1234 --processes 2 --process 0  # or 1
    python examples/gpt_report.py runs/*/metrics.csv         # curves of several runs in one PNG

The text is what every machine has, Python's standard library without its tests: some 12 million
bytes, of which every tenth file is held out. A token is a byte, so that losses are nats per byte.
`--text` reads the tokens of another text, such as the source of Linux that `python -m benchmarks
corpus` makes. Whatever the optimizer, step n of a seed sees the same tokens, and `by_use` gives the
same parameters to Muon: the stacked matrices of all layers, `(layers, rows, columns)`. A run that
is killed goes on from its last checkpoint, on a CPU bit for bit. Each of several processes computes
a part of every batch, and the first of them prints and writes metrics.
"""

import argparse
import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from gpt_flags import parse
from gpt_model import (
    AXES,
    BATCH_AXES,
    GPT,
    held_out_batches,
    keeps_norms,
    shardings_of,
)
from gpt_report import Metrics, plot, read, table
from muon_jax import Exchange, Routes, by_use, contrib, muon

# What decides the numbers of a run; a checkpoint goes on only under the same.
RECORDED = (
    *("depth", "width", "heads", "context", "batch", "steps", "seed", "dtype", "attention"),
    *("optimizer", "preset", "ns_coeffs", "preconditioning", "mu_dtype", "per_head"),
    *("block_period", "learning_rate", "adam_scale", "weight_decay"),
)


class State(NamedTuple):
    """All that a step changes and a checkpoint holds."""

    step: jax.Array
    params: Any
    optimizer: optax.OptState


def routes_of(options: argparse.Namespace) -> Routes:
    """Which parameters are matrices, read off the model: nothing runs."""
    options = argparse.Namespace(**vars(options) | {"attention": "xla"})  # cuDNN hides the heads
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(options, nnx.Rngs(0))))
    text = jax.ShapeDtypeStruct((options.batch, options.context), jnp.int32)
    return by_use(
        lambda params, text: nnx.merge(graph, params)(text),
        nnx.to_pure_dict(params),
        text,
        per_head=options.per_head,
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """The optimizer of that name after clipping, under warm-up, a stable rate and linear decay.

    Each decays the layers' matrices alone. A preset of `muon` brings its momentum, coefficients
    and AdamW; scale, decay and learning rate stay those of the other runs, to compare with them.
    One that keeps norms has its own scale, no decay, and its source's ratio of learning rates.
    """

    def schedule(step):
        rising, falling = (step + 1) / (0.05 * options.steps), (1 - step / options.steps) / 0.4
        return options.learning_rate * jnp.minimum(1.0, jnp.minimum(rising, falling))

    decay = options.weight_decay
    of_others = options.adam_scale
    if of_others is None:
        of_others = 3 / 13 if keeps_norms(options) else 1.0
    if options.optimizer == "adamw":
        stacks = functools.partial(jax.tree.map, lambda p: p.ndim == 3)
        others = functools.partial(jax.tree.map, lambda p: p.ndim != 3)
        optimizer = optax.chain(
            optax.adamw(schedule, b2=0.95, weight_decay=decay, mask=stacks),
            optax.masked(optax.scale(of_others), others),
        )
    else:
        names = ("preset", "ns_coeffs", "preconditioning", "mu_dtype")
        chosen = {name: getattr(options, name) for name in names}
        if options.block_period:
            chosen["shardings"] = Exchange(block_period=options.block_period)
        scale = {"weight_decay": decay, "consistent_rms": 0.2}
        if keeps_norms(options):
            scale = {"adamh": "^head/kernel$"}
        make = muon if options.optimizer == "muon" else optax.contrib.muon
        if options.preset in ("muonh", "nanogpt", "normuon"):
            make = getattr(contrib, chosen.pop("preset"))
        optimizer = make(
            schedule,
            adam_b2=0.95,
            adam_learning_rate=lambda step: of_others * schedule(step),
            adam_weight_decay=0.0,
            muon_weight_dimension_numbers=routes_of(options),
            **scale,
            **{name: value for name, value in chosen.items() if value is not None},
        )
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def make_functions(
    options: argparse.Namespace, optimizer: optax.GradientTransformation
) -> tuple[Callable, Callable, Callable, Callable]:
    """Returns the pure functions of a run: `init, apply_gradients, train_step, evaluate`."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(options, nnx.Rngs(0))))

    def init():
        model = GPT(options, nnx.Rngs(jax.random.key(options.seed)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    def loss_of(params, windows):
        windows = jax.lax.with_sharding_constraint(windows, P(BATCH_AXES)).astype(jnp.int32)
        logits = nnx.merge(graph, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def apply_gradients(state, gradients):
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), moments)

    def train_step(state, text, key):
        key_of_step = jax.random.fold_in(key, state.step)
        starts = jax.random.randint(key_of_step, options.batch, 0, text.size - options.context)
        windows = text[starts[:, None] + jnp.arange(options.context + 1)]
        loss, gradients = jax.value_and_grad(loss_of)(state.params, windows)
        return apply_gradients(state, gradients), loss

    def evaluate(params, batches):
        return jax.lax.map(functools.partial(loss_of, params), batches).mean()

    return init, apply_gradients, train_step, evaluate


def seconds_of_optimizer(apply_gradients: Callable, state: State) -> float:
    """Measures clipping, update and its addition: a program of their own, apart from the step's.

    The median of five rounds of four calls each, one call after another without waiting between,
    after one to warm up. The parameters stand in for gradients: the time depends on shapes alone.
    """
    jax.block_until_ready(apply_gradients(state, state.params))
    rounds = []
    for _ in range(5):
        start, trial = time.perf_counter(), state
        for _ in range(4):
            trial = apply_gradients(trial, state.params)
        jax.block_until_ready(trial)
        rounds.append((time.perf_counter() - start) / 4)
    return float(np.median(rounds))


def restore(
    checkpoints: ocp.CheckpointManager, shapes: State, shardings: State, config: dict[str, Any]
) -> State:
    """Returns the latest state that was saved, sharded as told: the mesh may be another.

    Raises:
        SystemExit: it is of another configuration, or cannot be read.
    """
    step = checkpoints.latest_step()

    def read(**items: Any) -> Any:
        try:
            return checkpoints.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # of many types: files may be cut off anywhere
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise SystemExit(
                f"the checkpoint {checkpoints.directory / str(step)} cannot be read: {reason}."
                " Delete its folder to go on from the one before it"
            ) from error

    saved = read(config=ocp.args.JsonRestore())["config"]
    differing = [
        f"{name} is {saved.get(name)!r} there and {config.get(name)!r} here"
        for name in sorted({*saved, *config})
        if saved.get(name) != config.get(name)
    ]
    if differing:
        raise SystemExit(
            f"{checkpoints.directory} holds another run: {', '.join(differing)}. Go on with its"
            " settings, or name another folder as --checkpoint"
        )
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return read(state=ocp.args.StandardRestore(target))["state"]


def train(options: argparse.Namespace, mesh: Mesh) -> None:
    """Takes the steps that no checkpoint has yet, and writes what they measured."""
    text = options.text
    config = {name: getattr(options, name) for name in RECORDED}
    config["text"] = hashlib.sha256(b"".join((text.train, text.held_out))).hexdigest()[:16]
    init, apply_gradients, train_step, evaluate = make_functions(options, make_optimizer(options))
    shapes = jax.eval_shape(init)
    shardings, everywhere = shardings_of(shapes, mesh), NamedSharding(mesh, P())
    folder = options.checkpoint
    kept = ocp.CheckpointManagerOptions(max_to_keep=2)
    checkpoints = ocp.CheckpointManager(folder.absolute(), options=kept) if folder else None
    if checkpoints and checkpoints.latest_step() is not None:
        state = restore(checkpoints, shapes, shardings, config)
    else:
        state = jax.jit(init, out_shardings=shardings)()
    start = int(state.step)
    if start == options.steps:
        raise SystemExit(f"{folder} already holds all {start} steps")
    if start % options.log_every:
        raise SystemExit(
            f"{folder} holds {start} steps, no multiple of --log-every {options.log_every}: pass a"
            " divisor of it, such as that of the run before"
        )

    # Compiled and called once on a copy, so that times are those of steps alone.
    data = jax.device_put((text.train, jax.random.key(options.seed)), everywhere)
    batches = held_out_batches(options, text.held_out)
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, BATCH_AXES)))
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere))
    step = step.lower(state, *data).compile()
    jax.block_until_ready(step(jax.tree.map(jnp.copy, state), *data))
    evaluate = jax.jit(evaluate)
    apply_gradients = jax.jit(apply_gradients, out_shardings=shardings)
    optimizer_seconds = seconds_of_optimizer(apply_gradients, state)

    tokens, seconds = options.batch * options.context, []  # seconds per step, by interval
    is_first = jax.process_index() == 0
    with (
        Metrics(options.output, start, tokens, options.tensorboard)
        if is_first
        else nullcontext() as metrics,
        tqdm(total=options.steps, initial=start, unit="step", disable=not is_first) as progress,
    ):
        for done in range(start + options.log_every, options.steps + 1, options.log_every):
            began, losses = time.perf_counter(), []
            for _ in range(options.log_every):
                state, loss = step(state, *data)
                losses.append(loss)
            row = {"train_loss": float(np.mean(jax.device_get(losses)))}  # waits for the device
            interval = time.perf_counter() - began
            seconds.append(interval / options.log_every)
            if done % options.eval_every == 0 or done == options.steps:
                row["held_out_loss"] = float(evaluate(state.params, batches))
            if metrics:
                metrics.write(done, interval, row)
            if checkpoints and (done % options.checkpoint_every == 0 or done == options.steps):
                items = {
                    "state": ocp.args.StandardSave(state),
                    "config": ocp.args.JsonSave(config),
                }
                checkpoints.save(done, args=ocp.args.Composite(**items))
            progress.update(options.log_every)
            progress.set_postfix_str(
                f"loss {row['train_loss']:.3f}, {tokens / seconds[-1]:,.0f} tokens/s,"
                f" optimizer {optimizer_seconds / seconds[-1]:.1%}"
            )
    if checkpoints:
        checkpoints.close()
    if not metrics:
        return
    device = mesh.devices.flat[0]
    title = f"{options.optimizer}, {mesh.size} × {device.device_kind}, {options.dtype}"
    plot([metrics.path], options.output / "curves.png", title)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    ratio = text.held_out.size / text.held_out_bytes
    print(table(read(metrics.path), seconds, tokens, optimizer_seconds, peak, ratio))
    print(f"Curves: {options.output / 'curves.png'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as the flags say."""
    # The large size needs 75 of 80 GB, of which JAX takes three quarters by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    options = parse(arguments)
    shape = tuple(options.mesh.values())
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices)
    with jax.set_mesh(mesh):
        train(options, mesh)


if __name__ == "__main__":
    main()
