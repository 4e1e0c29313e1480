"""HyperP: transfers a learning rate of MuonH to other widths, depths and numbers of tokens."""

import math
from typing import Annotated

from muon_jax._checks import Number, checks_arguments

Size = Annotated[float, Number("(0, inf)", 12)]
TOKENS_EXPONENT = -0.32


@checks_arguments
def hyperp_learning_rate(
    learning_rate: float,
    *,
    depth: Size,
    base_depth: Size,
    tokens: Size,
    base_tokens: Size,
) -> float:
    """Transfers a learning rate of `muonh` to a model of another size.

    If η₀ is the best rate for depth d₀ and T₀ tokens, the rate for depth d and T tokens is

        η = η₀ · √(d₀/d) · (T/T₀)^-0.32.

    The rate does not depend on the width, because a step is relative to the norm of its matrix. The
    rule assumes that

    -   hidden matrices keep their norms, and have no weight decay,
    -   residual branches are multiplied by 1/√(2d), as in Depth-μP,
    -   the batch size, the momentum and AdamW's decay rates do not change.

    Args:
        learning_rate: η₀.
        depth: d, the number of layers.
        base_depth: d₀.
        tokens: T, of the whole training.
        base_tokens: T₀.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a rate is negative, or another argument is not above 0.

    References:
        Ren et al., `Rethinking Language Model Scaling under Transferable Hypersphere Optimization
        <https://arxiv.org/abs/2603.28743>`_, 2026, and its code, pretrain.py in `ArchScale
        <https://github.com/microsoft/ArchScale>`_.
    """
    of_tokens = (tokens / base_tokens) ** TOKENS_EXPONENT
    return learning_rate * math.sqrt(base_depth / depth) * of_tokens
