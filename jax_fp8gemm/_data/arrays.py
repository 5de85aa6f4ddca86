"""Arrays: what an op takes as an array, before it checks anything about it."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_fp8gemm._data.formats import FLOAT_DTYPES

Lhs = TypeVar("Lhs")
Rhs = TypeVar("Rhs")
Operand = TypeVar("Operand", bound=jax.Array | np.ndarray)


@runtime_checkable
class Typed(Protocol):
    """What has a shape and a dtype: an array of JAX or NumPy, a tracer, the type of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...


def is_array(x: object) -> TypeGuard[jax.Array | np.ndarray]:
    """Returns whether `x` is an array of JAX or NumPy, or a tracer; not one with a mask."""
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, np.ma.MaskedArray)


def is_tracer(x: object) -> bool:
    """Returns whether `x` stands for an array of a program that is being traced."""
    return isinstance(x, Tracer)


def is_extended(x: Typed) -> bool:
    """Returns whether `x` holds something other than numbers, such as keys of jax.random."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def as_array(x: Any) -> Any:  # what is no array stays as it is, for check_array to refuse
    """Returns the array that `x` stands for, such as the value of a flax.nnx.Param, or `x` itself.

    NumPy scalars become arrays. Without x64, f64 of NumPy is f32, as in jax.numpy.
    """
    if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array):
        x = x.__jax_array__()
    if not isinstance(x, np.generic | np.ndarray):
        return x
    if isinstance(x, np.ma.MaskedArray):
        return cast(Any, x)
    dtype = cast(np.dtype, x.dtype)
    is_f64 = dtype == np.float64 and dtype.isnative
    with np.errstate(over="ignore"):
        return np.asarray(x, jax.dtypes.canonicalize_dtype(np.float64) if is_f64 else None)


def match_floats(lhs: Lhs, rhs: Rhs) -> tuple[Lhs | jax.Array, Rhs | jax.Array]:
    """Returns the operands of a product, with integers beside floats cast to the floats' dtype."""
    if not (is_array(lhs) and is_array(rhs)):
        return lhs, rhs

    def match(x: Operand, other: Typed) -> Operand | jax.Array:
        is_integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
        is_integer = is_integer and jnp.dtype(x.dtype).isnative
        is_float = any(other.dtype == dtype for dtype in FLOAT_DTYPES)
        return jnp.asarray(x).astype(other.dtype) if is_integer and is_float else x

    return match(lhs, rhs), match(rhs, lhs)
