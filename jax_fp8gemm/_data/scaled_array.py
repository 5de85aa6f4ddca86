"""ScaledArray: FP8 values with one f32 scale for each block."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm._data.methods import method
from jax_fp8gemm._runtime import jax_drift
from jax_fp8gemm._runtime.html_table import html_table

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

    - block (1, 128): scale is (..., r, ceil(c / 128)): 128 neighbours of a row share a scale.
    - block (128, 128): scale is (..., ceil(r / 128), ceil(c / 128)).

    An array with block (128, 128) may store its values, or the transposed values, or both. If only
    the latter are stored, the scale is stored transposed too: (..., ceil(c / 128), ceil(r / 128)).
    Scales are finite and positive. Where a block held an Inf or a NaN, its scale and all its values
    are NaN. A ScaledArray is a pytree of values, scale and transposed: jit, vmap (over leading
    dimensions), scan, shardings and jax.export take it like any other.

    Attributes:
      values: (..., r, c), float8_e4m3fn or float8_e5m2; or None, if only `transposed` is stored.
      scale: float32, the dequantisation factor, of `values`; without them, of `transposed`.
      transposed: the values with their last two dimensions swapped, stored as (..., c, r), or None.
        Only block (128, 128) has it.
      block: (1, 128) or (128, 128); static.
    """

    values: Float[Array, "*batch r c"] | None
    scale: Float32[Array, "*batch r_blocks c_blocks"]
    transposed: Float[Array, "*batch c r"] | None = None
    block: tuple[int, int] = field(default=(1, 128), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the values, whether they or only the transposed ones are stored."""
        if self.values is None and self.transposed is not None:
            *batch, c, r = self.transposed.shape
            return (*batch, r, c)
        return self._stored.shape

    @property
    def dtype(self) -> np.dtype:
        """Returns the FP8 dtype of the values."""
        return self._stored.dtype

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the values."""
        return self._stored.ndim

    @property
    def _stored(self) -> Any:
        """The array that `scale` belongs to: the values or, if those are None, `transposed`."""
        return self.transposed if self.values is None else self.values

    @property
    def T(self) -> ScaledArray:
        """Returns the exact transpose of the last two dimensions, for block (128, 128) only.

        It moves no value: `values` and `transposed` change places.
        """
        for name, x in (("values", self._stored), ("scale", self.scale)):
            if not arrays.is_array(x) or arrays.is_extended(x):
                got = checks.short_type(x)
                raise TypeError(f"ScaledArray.T: {name} must be an array of numbers; got {got}")
        if self.block != (128, 128):
            raise ValueError(
                f"ScaledArray.T: block must be (128, 128); got {checks.short_repr(self.block)}. "
                "The transpose of a 1x128 array has 128x1 blocks; quantise along r, the dimension "
                "before the last: quantize(x, axis=-2)."
            )
        is_both = self.values is not None and self.transposed is not None
        scale = self.scale.mT if is_both else self.scale
        return ScaledArray(self.transposed, scale, self.values, self.block)

    mT = T

    @property
    def size(self) -> int:
        """Returns the number of values, each counted once."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all that is stored, which are values, both ways, and scales."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @classmethod
    def from_reciprocal_scale(
        cls, values: Float[Array, "*batch r c"], scale: Any, block: tuple[int, int] = (1, 128)
    ) -> ScaledArray:
        """Returns an array whose source gives factors of quantisation: value = real * scale.

        NOTE: the `weight_scale_inv` of DeepSeek's checkpoints is, in spite of its name, the factor
        of dequantisation, which ScaledArray itself takes.
        """
        return cls(values, 1 / jnp.asarray(scale, jnp.float32), None, block)

    def astype(self, dtype: DTypeLike) -> ScaledArray | Float[Array, "*batch r c"]:
        """Returns the array itself for its own dtype, and dequantize(dtype) for a float dtype."""
        is_fp8 = any(dtype == fp8 for fp8 in formats.FP8_DTYPES)
        if is_fp8 and dtype == self.dtype:
            return self
        if is_fp8:
            raise TypeError(
                f"ScaledArray.astype: dtype must be {checks.short_dtype(self.dtype)}, or bf16, f16 "
                f"or f32; got {checks.short_dtype(dtype)}. Another FP8 format rounds again: "
                "quantize(x.dequantize(), dtype=...)."
            )
        return method("dequantize")(self, dtype)

    # NumPy's arrays then leave x @ w to __rmatmul__.
    __array_ufunc__ = None

    def __matmul__(self, rhs: Any) -> Any:
        """Raises the TypeError of jax_fp8gemm.matmul, whose lhs no ScaledArray can be."""
        return method("matmul")(self, rhs)

    def __rmatmul__(self, lhs: Any) -> Any:
        """Returns jax_fp8gemm.matmul(lhs, self)."""
        return method("matmul")(lhs, self)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Raises TypeError; without it NumPy would make an array with one object."""
        raise TypeError(
            "ScaledArray: it must be dequantised before NumPy or JAX read it as an array of "
            f"numbers; got {checks.short_type(self)}. Use .dequantize()."
        )

    def __getitem__(self, index: Any) -> ScaledArray:
        """Returns the element, or the elements, of the leading dimensions; r and c stay whole.

        An ellipsis returns the array itself.
        """
        return method("take")(self, index)

    def __iter__(self) -> Iterator[ScaledArray]:
        """Yields the elements of the first dimension."""
        if self.ndim < 3:
            raise TypeError(
                "ScaledArray: only an array with leading dimensions can be iterated over; "
                f"got {checks.short_type(self)}. Iterate over what dequantize returns."
            )
        return (self[i] for i in range(self.shape[0]))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "*batch r c"]:
        """Returns value * scale in float32, rounded to `dtype`; see jax_fp8gemm.dequantize."""
        return method("dequantize")(self, dtype)

    def __repr__(self) -> str:
        is_turned = self.values is None and self.transposed is not None
        stored = f"{'transposed' if is_turned else 'values'}={checks.short_type(self._stored)}"
        also = "" if is_turned or self.transposed is None else ", transposed"
        scale = checks.short_type(self.scale)
        return f"ScaledArray({stored}, scale={scale}, block={self.block}{also})"

    def _repr_html_(self) -> str:
        """Returns a table of what is stored: types and bytes. It reads no value."""
        parts = {"values": self.values, "transposed": self.transposed, "scale": self.scale}
        stored = {name: x for name, x in parts.items() if x is not None}
        size: Callable[[Any], str] = lambda x: f"{x.nbytes:,} bytes" if hasattr(x, "nbytes") else ""
        rows = [(name, checks.short_type(x), size(x)) for name, x in stored.items()]
        return html_table(f"ScaledArray, block {self.block}", rows)


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


def values_and_scale(x: ScaledArray) -> tuple[Any, Any]:
    """Returns the values and their scale, transposing if only the transposed values are stored."""
    if x.values is None and x.transposed is not None:
        return x.transposed.mT, x.scale.mT
    return x.values, x.scale


def without_twin(x: ScaledArray) -> ScaledArray:
    """Returns `x` with its values stored, and not the transposed ones."""
    return ScaledArray(*values_and_scale(x), None, x.block)


def twin_of(x: ScaledArray) -> tuple[Any, Any] | None:
    """Returns the transposed values and their scale, or None where they are not stored."""
    if x.transposed is None:
        return None
    return x.transposed, x.scale if x.values is None else x.scale.mT


# The same products of operands that are quantised already.
_OF_QUANTISED = {
    "matmul": "scaled_matmul",
    "dot_general": "scaled_matmul",
    "ragged_dot": "scaled_ragged_dot",
}


def check_unquantised(op: str, name: str, x: object) -> None:
    """Raises TypeError unless `x` is an array of floats, which the op itself quantises."""
    if isinstance(x, ScaledArray):
        raise TypeError(
            f"{op}: {name} must be an array; got a ScaledArray {checks.short_type(x)}. "
            f"{op} quantises {name} itself: pass the array from before quantize."
            + (f" {_OF_QUANTISED[op]} takes two ScaledArrays." if op in _OF_QUANTISED else "")
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
    checks.check_array(op, f"{name}.scale", x.scale)
    if x.values is None and x.transposed is not None:
        transposed = checks.check_array(op, f"{name}.transposed", x.transposed)
        checks.check_scaled(op, f"{name}.transposed", transposed, x.scale, x.block)
    else:
        values = checks.check_array(op, f"{name}.values", x.values)
        hint = _hint_of_block(x, x.block)
        checks.check_scaled(op, name, values, x.scale, x.block, hint=hint)
    if x.transposed is None:
        return
    *batch, r, c = x.shape
    expected = jax.ShapeDtypeStruct((*batch, c, r), x.dtype)
    if x.block != (128, 128) or checks.short_type(x.transposed) != checks.short_type(expected):
        raise ValueError(
            f"{op}: {name}.transposed must be None, or {checks.short_type(expected)} with block "
            f"(128, 128); got {checks.short_type(x.transposed)} with block {x.block}"
        )


def _hint_of_block(x: ScaledArray, block: object) -> str:
    """Says what to do about an array of 1x128 blocks whose scale has the shape for squares."""
    if not isinstance(block, tuple) or block != (1, 128) or x.ndim < 2:
        return ""
    is_square = x.scale.shape == formats.scale_shape(x.shape, (128, 128))
    return "The scale fits block=(128, 128): pass it." if is_square else ""
