"""ScaledArray: FP8 values with one f32 scale for each block."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._runtime import jax_drift
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale", "transposed"],
    meta_fields=["block"],
)
@dataclass(frozen=True, eq=False)
class ScaledArray:
    """A quantised array: real = value * scale of the value's block.

    These invariants hold for values (..., r, c). An op checks them when it takes a ScaledArray. The
    constructor checks nothing, because a pytree may hold anything in the place of its leaves.
      block (1, 128): scale is (..., r, ceil(c / 128)): 128 neighbours of a row share a scale.
      block (128, 128): scale is (..., ceil(r / 128), ceil(c / 128)).
    Scales are finite and positive. Where a block held an Inf or a NaN, its scale and all its values
    are NaN. A ScaledArray is a pytree of values, scale and transposed: jit, vmap (over leading
    dimensions), scan, shardings and jax.export take it like any other.

    Attributes:
      values: (..., r, c), float8_e4m3fn or float8_e5m2.
      scale: float32, the dequantisation factor.
      transposed: the values with their last two dimensions swapped, stored as (..., c, r), or None.
        Only block (128, 128) has it: its scale is then the same, transposed.
      block: (1, 128) or (128, 128); static.
    """

    values: Float[Array, "*batch r c"]
    scale: Float32[Array, "*batch r_blocks c_blocks"]
    transposed: Float[Array, "*batch c r"] | None = None
    block: tuple[int, int] = field(default=(1, 128), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """Returns the FP8 dtype of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the values."""
        return self.values.ndim

    @property
    def T(self) -> ScaledArray:
        """Returns the exact transpose of the last two dimensions, for block (128, 128) only.

        It costs nothing if `transposed` is stored: the two then change places.
        """
        for name, x in (("values", self.values), ("scale", self.scale)):
            if not arrays.is_array(x) or arrays.is_extended(x):
                got = checks.short_type(x)
                raise TypeError(f"ScaledArray.T: {name} must be an array of numbers; got {got}")
        if self.block != (128, 128):
            raise ValueError(
                f"ScaledArray.T: block must be (128, 128); got {checks.short_repr(self.block)}. "
                "The transpose of a 1x128 array has 128x1 blocks; quantise along r, the dimension "
                "before the last: quantize(x, axis=-2)."
            )
        if self.transposed is None:
            return ScaledArray(self.values.mT, self.scale.mT, None, self.block)
        return ScaledArray(self.transposed, self.scale.mT, self.values, self.block)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "*batch r c"]:
        """Returns value * scale in float32, rounded to `dtype`; see jax_fp8gemm.dequantize."""
        return dequantize(self, dtype)

    def __repr__(self) -> str:
        parts = f"values={checks.short_type(self.values)}, scale={checks.short_type(self.scale)}"
        transposed = "" if self.transposed is None else ", transposed"
        return f"ScaledArray({parts}, block={self.block}{transposed})"


# NOTE: JAX refuses to register a name twice. A process may import the package anew, because an
# import failed half way or sys.modules was emptied. The new class ScaledArray then takes over.
_registered = jax_drift.optional("jax._src.export._export.deserialization_registry", {})
_registered.pop("jax_fp8gemm.ScaledArray", None)
# The static part, (block,), is stored as two bytes.
jax.export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="jax_fp8gemm.ScaledArray",
    serialize_auxdata=lambda static: bytes(static[0]),
    deserialize_auxdata=lambda block: (tuple(block),),
)


@naming_devices
def dequantize(x: ScaledArray, dtype: DTypeLike = jnp.float32) -> Float[Array, "*batch r c"]:
    """Returns value * scale: the product in float32, rounded once to `dtype`.

    Args:
      x: any ScaledArray, leading dimensions allowed.
      dtype: bfloat16, float16 or float32.
    Returns:
      Array of x.shape. A block that held Inf or NaN is NaN throughout.
    Raises:
      TypeError: x is no ScaledArray, or a dtype is wrong. ValueError: scale and values disagree.
    """
    x = arrays.as_array(x)
    check_scaled_array("dequantize", "x", x)
    dtype = checks.check_out_dtype("dequantize", "dtype", dtype, formats.FLOAT_DTYPES)
    x = jax.tree.map(jnp.asarray, x)  # pyright: ignore[reportUnknownArgumentType]  # JAX's own
    spec = lambda: jax.typeof(x.values).sharding.spec
    return with_auto_axes(partial(_dequantize, dtype=dtype), [x], spec)


def _dequantize(x: ScaledArray, dtype: np.dtype) -> Float[Array, "*batch r c"]:
    # NOTE: XLA on GPU removes a rounding to FP8 that it can see being undone in the same program.
    values = jax.lax.optimization_barrier(x.values)
    return (values.astype(jnp.float32) * spread_scale(x)).astype(dtype)


def spread_scale(x: ScaledArray) -> Float32[Array, "*batch r c"]:
    """Returns the scale of every value."""
    *_, r, c = x.shape
    scale = x.scale
    if x.block[0] != 1:
        scale = jnp.repeat(scale, formats.SCALE_BLOCK, axis=-2)[..., :r, :]
    return jnp.repeat(scale, formats.SCALE_BLOCK, axis=-1)[..., :c]


def check_unquantised(op: str, name: str, x: object) -> None:
    """Raises TypeError unless `x` is an array of floats, which the op itself quantises."""
    if isinstance(x, ScaledArray):
        raise TypeError(
            f"{op}: {name} must be an array; got a ScaledArray {checks.short_type(x)}. "
            f"{op} quantises {name} itself: pass the array from before quantize."
        )
    array = checks.check_array(op, name, x)
    checks.check_dtype(op, name, array, formats.FLOAT_DTYPES)


def check_scaled_array(op: str, name: str, x: object) -> None:
    """Raises with a sentence if `x` breaks the invariants of a ScaledArray."""
    if not isinstance(x, ScaledArray):
        raise TypeError(
            f"{op}: {name} must be a ScaledArray; got {checks.short_type(x)}. "
            "Make one with jax_fp8gemm.quantize."
        )
    checks.check_array(op, f"{name}.values", x.values)
    checks.check_array(op, f"{name}.scale", x.scale)
    checks.check_scaled(op, name, x.values, x.scale, x.block)
    if x.transposed is None:
        return
    *batch, r, c = x.shape
    expected = jax.ShapeDtypeStruct((*batch, c, r), x.dtype)
    if x.block != (128, 128) or checks.short_type(x.transposed) != checks.short_type(expected):
        raise ValueError(
            f"{op}: {name}.transposed must be None, or {checks.short_type(expected)} with block "
            f"(128, 128); got {checks.short_type(x.transposed)} with block {x.block}"
        )
