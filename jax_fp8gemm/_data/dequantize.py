"""dequantize: the real numbers of a ScaledArray."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.methods import define_method
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


@naming_devices
def dequantize(x: ScaledArray, dtype: DTypeLike = jnp.float32) -> Float[Array, "*batch r c"]:
    """Returns value * scale: the product in float32, rounded once to `dtype`.

    Args:
      x: any ScaledArray, leading dimensions allowed.
      dtype: bfloat16, float16 or float32.
    Returns:
      Array of x.shape. A block that held Inf or NaN is NaN throughout.
    Raises:
      TypeError: x is no ScaledArray, or a dtype is wrong.
      ValueError: scale and values disagree.
    """
    x = arrays.as_array(x)
    check_scaled_array("dequantize", "x", x)
    dtype = checks.check_out_dtype("dequantize", "dtype", dtype, formats.FLOAT_DTYPES)
    x = jax.tree.map(jnp.asarray, x)  # pyright: ignore[reportUnknownArgumentType]  # JAX's own
    if x.values is None:
        return dequantize(x.T, dtype).mT
    spec = lambda: jax.typeof(x.values).sharding.spec
    run = partial(_dequantize, block=x.block, dtype=dtype)
    return with_auto_axes(run, [x.values, x.scale], spec)


def _dequantize(
    values: Float[Array, "*batch r c"],
    scale: Float32[Array, "*batch r_blocks c_blocks"],
    block: tuple[int, int],
    dtype: np.dtype,
) -> Float[Array, "*batch r c"]:
    # NOTE: XLA on GPU removes a rounding to FP8 that it can see being undone in the same program.
    values = jax.lax.optimization_barrier(values)
    return (values.astype(jnp.float32) * spread_scale(scale, values.shape, block)).astype(dtype)


def spread_scale(
    scale: Float32[Array, "*batch r_blocks c_blocks"],
    shape: tuple[int, ...],
    block: tuple[int, int],
) -> Float32[Array, "*batch r c"]:
    """Returns the scale of every value of an array of `shape`."""
    *_, r, c = shape
    if block[0] != 1:
        scale = jnp.repeat(scale, formats.SCALE_BLOCK, axis=-2)[..., :r, :]
    return jnp.repeat(scale, formats.SCALE_BLOCK, axis=-1)[..., :c]


define_method(dequantize)
