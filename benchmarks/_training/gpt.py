"""A GPT with stacked layers: parameters, their matrices, and the loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax import MuonDimensionNumbers

type Parameters = Any  # a tree of arrays, as `GPT.init` makes it


@dataclasses.dataclass(frozen=True)
class GPT:
    """The sizes of a GPT: pre-norm, RMSNorm, learned positions, no biases, an untied head.

    Attributes:
        width: of the residual stream.
        layers: the number of layers. Each has attention and an MLP four times as wide as the
            residual stream.
        head_size: the width of each head of the attention; it divides `width`.
        context: the number of tokens that the model sees.
        vocabulary: the number of tokens that there are.

    Raises:
        ValueError: a size is below 1, or `head_size` does not divide `width`.
    """

    width: int = 384
    layers: int = 6
    head_size: int = 64
    context: int = 512
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.width % self.head_size:
            raise ValueError(
                "sizes must be at least 1 and width a multiple of head_size, got"
                f" {dataclasses.asdict(self)}"
            )

    def init(self, key: jax.Array) -> Parameters:
        """Returns random parameters in float32, those of the layers stacked along a leading axis.

        `attention` holds the matrices of query, key, value and output, `(layers, 4, width, width)`.
        Matrices map unit variance to unit variance. The head is zero, so all tokens are equally
        likely at first.
        """
        layers, width = self.layers, self.width
        # One draw for all parameters compiles faster. Each parameter is some rows of this width.
        ends = np.cumsum([self.vocabulary, self.context] + 3 * [4 * layers * width])
        normal = jax.random.normal(key, (ends[-1], width))
        embedding, positions, attention, up, down = jnp.split(normal, ends[:-1])
        return {
            "embedding": embedding,
            "positions": positions,
            "layers": {
                "attention_norm": jnp.ones((layers, width)),
                "attention": attention.reshape(layers, 4, width, width) / width**0.5,
                "mlp_norm": jnp.ones((layers, width)),
                "up": up.reshape(layers, width, 4 * width) / width**0.5,
                "down": down.reshape(layers, 4 * width, width) / (4 * width) ** 0.5,
            },
            "norm": jnp.ones(width),
            "head": jnp.zeros((width, self.vocabulary)),
        }

    def dimension_numbers(self) -> Parameters:
        """Returns Muon's dimension numbers for the layers' matrices, None for other parameters."""
        matrices = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return {
            **dict.fromkeys(("embedding", "positions", "norm", "head")),
            "layers": {
                **dict.fromkeys(("attention_norm", "mlp_norm")),
                **dict.fromkeys(("attention", "up", "down"), matrices),
            },
        }

    def loss(self, parameters: Parameters, windows: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of each token given the tokens before it, in nats.

        Args:
            parameters: as `init` makes them.
            windows: tokens, integers of shape `(batch, context + 1)`. In each window all tokens but
                the first are targets.
        """
        logits, targets = self.logits(parameters, windows[:, :-1]), windows[:, 1:]
        # A mask, because gradients of gathered logits are scattered.
        is_target = targets[..., None] == jnp.arange(self.vocabulary)
        of_targets = jnp.where(is_target, logits, 0.0).sum(axis=-1)
        return (jax.nn.logsumexp(logits, axis=-1) - of_targets).mean()

    def logits(self, parameters: Parameters, text: jax.Array) -> jax.Array:
        """Returns logits of the next tokens, float32 `(batch, context, vocabulary)`.

        Products are in bfloat16, normalizations and softmax in float32.

        Args:
            parameters: as `init` makes them.
            text: tokens, of shape `(batch, context)`.
        """
        parameters = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        # A product, because its gradient then sums in float32 and in a fixed order.
        one_hot = jax.nn.one_hot(text, self.vocabulary, dtype=jnp.bfloat16)
        x = one_hot @ parameters["embedding"] + parameters["positions"]
        # Unrolled, what the layers keep for the gradient is not copied into stacks.
        x, _ = jax.lax.scan(self._layer, x, parameters["layers"], unroll=self.layers)
        x = _rms_norm(x, parameters["norm"])
        return jnp.matmul(x, parameters["head"], preferred_element_type=jnp.float32)

    def _layer(self, x: jax.Array, layer: Parameters) -> tuple[jax.Array, None]:
        """Attention, then an MLP, each on normalized `(batch, context, width)`."""
        *inputs, output = layer["attention"]
        normalized = _rms_norm(x, layer["attention_norm"])
        heads = (*x.shape[:2], -1, self.head_size)
        query, key, value = ((normalized @ matrix).reshape(heads) for matrix in inputs)
        fused = "cudnn" if jax.default_backend() == "gpu" else "xla"
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=fused
        )
        x = x + attended.reshape(x.shape) @ output
        hidden = jax.nn.gelu(_rms_norm(x, layer["mlp_norm"]) @ layer["up"])
        return x + hidden @ layer["down"], None


def _rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    in_float32 = x.astype(jnp.float32)
    mean_square = jnp.mean(in_float32**2, axis=-1, keepdims=True)
    return (in_float32 * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * gain
