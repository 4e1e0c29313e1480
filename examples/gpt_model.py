"""A GPT, layers stacked; how its parameters are sharded; the text that it learns."""

import argparse
import functools
import json
import lzma
import re
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")  # of the mesh
BATCH_AXES = ("data", "fsdp")
# The sharding of a parameter, and of its moments, by its path; whole on every device without one.
SHARDING_RULES = {
    r"layers/(query|key|value|up)/kernel(/codes|/scales)?$": P(None, "fsdp", "tensor"),
    r"layers/(out|down)/kernel(/codes|/scales)?$": P(None, "tensor", "fsdp"),
    r"embedding/kernel$": P(None, "fsdp"),
    r"head/kernel$": P("fsdp", None),
}


class Text(NamedTuple):
    """What a model learns, tokens in uint8 or uint16 of shape `(tokens,)`.

    Attributes:
        train: the tokens to train on.
        held_out: those of other files.
        vocabulary: how many tokens there are.
        held_out_bytes: how long those other files are.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int
    held_out_bytes: int


def keeps_norms(options: argparse.Namespace) -> bool:
    """Whether the preset keeps the norms of matrices, so that a zero matrix stays zero."""
    return options.preset == "muonh"


def init_of_outputs(options: argparse.Namespace) -> nnx.Initializer:
    """Zeros for the matrices that write to the stream and the head, unless norms are kept."""
    return nnx.initializers.lecun_normal() if keeps_norms(options) else nnx.initializers.zeros


class Block(nnx.Module):
    """Attention, then a perceptron, each on normalized tokens and added to them."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs):
        width, self.head_width = options.width, options.width // options.heads
        self.attention = options.attention
        norm = functools.partial(nnx.RMSNorm, dtype=options.dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=options.dtype, rngs=rngs)
        into_stream = functools.partial(linear, kernel_init=init_of_outputs(options))
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.query_norm, self.key_norm = norm(self.head_width), norm(self.head_width)
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.out = into_stream(width, width)
        self.up, self.down = linear(width, 4 * width), into_stream(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens `(batch, context, width)` to tokens."""
        normalized = self.attention_norm(x)
        query, key, value = (
            projection(normalized).reshape(*x.shape[:2], -1, self.head_width)
            for projection in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(
            rotate(self.query_norm(query)),
            rotate(self.key_norm(key)),
            value,
            is_causal=True,
            implementation=self.attention,
        )
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(jnp.square(nnx.relu(self.up(self.mlp_norm(x)))))


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of `(batch, context, heads, width)` by angles in proportion to their position."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class GPT(nnx.Module):
    """A transformer over tokens whose layers are stacked and scanned."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=options.depth)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(options, rngs)

        linear = functools.partial(nnx.Linear, use_bias=False, dtype=options.dtype, rngs=rngs)
        vocabulary, init = options.text.vocabulary, nnx.initializers.normal(1.0)
        # A product with one-hot rows, whose gradient is summed in a fixed order.
        self.embedding = linear(vocabulary, options.width, kernel_init=init)
        self.layers = stacked(rngs)
        self.norm = nnx.RMSNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.head = linear(
            options.width,
            vocabulary,
            kernel_init=init_of_outputs(options),
            preferred_element_type=jnp.float32,
        )

    def __call__(self, text: jax.Array) -> jax.Array:
        """Maps tokens `(batch, context)` to float32 logits `(…, vocabulary)` of the next."""

        # A GPU spends a third less time in a step whose layers are unrolled; a CPU, no less.
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, unroll=jax.default_backend() == "gpu")
        def through(x: jax.Array, block: Block) -> jax.Array:
            return jax.lax.with_sharding_constraint(block(x), P(BATCH_AXES))

        x = self.embedding(jax.nn.one_hot(text, self.embedding.in_features))
        return self.head(self.norm(through(x, self.layers)))


def read_text(path: Path | None) -> Text:
    """Returns the tokens in a file that `python -m benchmarks corpus` wrote.

    Without a path, returns the bytes of the standard library's Python files, of which every tenth
    is held out.
    """
    if path:
        with lzma.open(path) as file:
            facts = json.loads(file.readline())
            tokens = np.frombuffer(file.read(), "<u2")
        train, held_out = np.split(tokens, [facts["train_tokens"]])
        return Text(train, held_out, facts["vocabulary"], facts["validation_bytes"])
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    paths = sorted(p for p in folder.rglob("*.py") if not left_out & {*p.relative_to(folder).parts})
    splits = [paths[i] for i in range(len(paths)) if i % 10], paths[::10]
    train, held_out = (
        np.frombuffer(b"".join(path.read_bytes() for path in s), np.uint8) for s in splits
    )
    return Text(train, held_out, 256, held_out.size)


def held_out_batches(options: argparse.Namespace, held_out: np.ndarray) -> np.ndarray:
    """Returns eight batches of windows at even distances, `(8, batch, context + 1)`."""
    starts = np.linspace(0, held_out.size - options.context - 1, 8 * options.batch).astype(int)
    return held_out[starts.reshape(8, -1, 1) + np.arange(options.context + 1)]


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each leaf, parameters and moments alike, by `SHARDING_RULES`."""

    def sharding(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        specs = [spec for pattern, spec in SHARDING_RULES.items() if re.search(pattern, name)]
        axes = zip(leaf.shape, specs[0] if specs else (), strict=False)
        return NamedSharding(mesh, P(*(axis if size > 1 else None for size, axis in axes)))

    return jax.tree.map_with_path(sharding, tree)
