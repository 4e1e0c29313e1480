"""Passes over words give the bits that passes over elements do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_jax._iteration import operand

DTYPES = [jnp.bfloat16, jnp.float16]


def every_number(dtype):
    """All 2¹⁶ of them, infinities, NaN and signed zeros too."""
    bits = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype).reshape(4, 64, 256)


def bits(x):
    return np.where(np.isnan(x), 0, np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_elementwise(dtype, out_dtype):
    x, factor = every_number(dtype), jnp.float32([0.5, 1.0, 2.0**-3, 3.0])[:, None, None]

    def function(x):
        return (x * factor).astype(out_dtype)

    jitted = jax.jit(lambda x: operand.elementwise_packed(function, x))
    np.testing.assert_array_equal(bits(jitted(x)), bits(jax.jit(function)(x)))
    assert "uint32" in str(jax.make_jaxpr(jitted)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_added_and_cut_off(dtype):
    x = every_number(dtype)
    padded = jax.jit(lambda x: operand.pad_packed(x, 3, 6))(x)
    np.testing.assert_array_equal(bits(padded), np.pad(bits(x), [(0, 0), (0, 3), (0, 6)]))
    for shape in ((0, 4, 6), (2, 0, 6), (2, 4, 0)):
        empty = jnp.zeros(shape, dtype)
        assert operand.elementwise_packed(jnp.negative, empty).shape == shape
        assert operand.cut_packed(operand.pad_packed(empty, 3, 6), *shape[1:]).shape == shape
    for cols in (256, 255):
        cut = jax.jit(lambda x, cols=cols: operand.cut_packed(x, 64, cols))(padded)
        np.testing.assert_array_equal(bits(cut), bits(x)[..., :cols])


@pytest.mark.parametrize("x", [jnp.ones((4, 6), "float32"), jnp.ones((4, 5), "bfloat16")])
def test_other_arrays_are_seen_as_they_are(x):
    for function in (
        lambda x: operand.elementwise_packed(jnp.negative, x),
        lambda x: operand.pad_packed(x, 4, 2),
        lambda x: operand.cut_packed(x, 3, 4),
    ):
        assert "uint32" not in str(jax.make_jaxpr(function)(x))
    widened = jax.make_jaxpr(lambda x: operand.elementwise_packed(lambda x: x.astype("float32"), x))
    assert "uint32" not in str(widened(jnp.ones((4, 6), "bfloat16")))
