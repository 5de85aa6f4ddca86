"""Argument checks: the only module that formats shape and dtype errors.

Every message reads `<op>: <what must hold>; got <actual>. <what to do>`, with JAX's short types.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data.arrays import Typed, as_array, is_array, is_tracer
from jax_fp8gemm._data.formats import (
    BLOCKS,
    FLOAT_DTYPES,
    FP8_DTYPES,
    IMPLEMENTATIONS,
    SCALE_BLOCK,
    scale_shape,
)

# A wrong shape is a ValueError. An op that replaces one of JAX raises what that one raises.
Error = type[ValueError] | type[TypeError]
# A DTypeLike, or the dtype of a jax.random.key, which has no public type, or whatever is given.
AnyDType = Any


def short_dtype(dtype: AnyDType) -> str:
    """Returns the name that XLA prints: `f8e4m3fn`, `bf16`, `f32`, `s32`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)  # key<fry>
    if not jnp.dtype(dtype).isnative:
        return f"byte-swapped {short_dtype(jnp.dtype(dtype).newbyteorder())}"
    name = jnp.dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return name.replace(long, short, 1).replace("_", "")
    return name


def short_type(x: object) -> str:
    """Returns the type of an array, as in `f8e4m3fn[4096,7168]`; of others the Python type."""
    shape: tuple[object, ...] | None = getattr(x, "shape", None)  # numpy.shape is a function
    dtype: AnyDType = getattr(x, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return type(x).__name__
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"


def short_repr(x: object) -> str:
    """Returns the repr of a wrong argument if that is a short line, or else its type."""
    if is_array(x):
        return short_type(x)
    try:
        text = repr(x)
    except Exception:  # an int of too many digits, or whatever the caller's class does
        text = ""
    return text if 0 < len(text) <= 80 and "\n" not in text else type(x).__name__


def _short_dtypes(dtypes: Sequence[np.dtype]) -> str:
    names = [short_dtype(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _then(hint: str) -> str:
    """Returns the hint as a sentence behind a message, or nothing if there is no hint."""
    return f". {hint}" if hint else ""


def check_array(op: str, name: str, x: object, *, hint: str = "") -> jax.Array | np.ndarray:
    """Raises TypeError unless `x` is an array, and ValueError if it is in host memory."""
    if not is_array(x):
        got = type(x).__name__
        if isinstance(x, list | tuple):
            hint = "jnp.asarray makes one of numbers, jnp.stack of arrays."
        raise TypeError(f"{op}: {name} must be an array; got {got}{_then(hint)}")
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space is jax.memory.Space.Host:
        raise ValueError(
            f"{op}: {name} must be in device memory; got {short_type(x)} in host memory. Bring it "
            "back with jax.device_put(..., jax.memory.Space.Device)."
        )
    return x


def check_dtype(
    op: str, name: str, x: Typed, dtypes: Sequence[np.dtype], *, hint: str = ""
) -> None:
    """Raises TypeError unless the dtype of `x` is one of `dtypes`."""
    if not any(x.dtype == dtype for dtype in dtypes):  # np.dtype() does not know the dtype of keys
        if x.dtype == np.float64 and FLOAT_DTYPES[-1] in dtypes:
            hint = "jax_enable_x64 keeps f64 as it is: cast it with astype(jnp.float32)."
        elif not hint and tuple(dtypes) == FLOAT_DTYPES and _is_integer(x.dtype):
            hint = f"Cast {name} with astype(jnp.bfloat16)."
        expected = _short_dtypes(dtypes)
        got = f"got {name} {short_type(x)}{_then(hint)}"
        raise TypeError(f"{op}: {name} must be {expected}; {got}")


def _is_integer(dtype: AnyDType) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.integer)


def check_integers(op: str, name: str, x: Typed) -> None:
    """Raises TypeError unless `x` has an integer dtype."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be integers; got {name} {short_type(x)}")


def check_ndim(
    op: str,
    name: str,
    x: Typed,
    ndim: int,
    layout: str,
    *,
    hint: str = "",
    error: Error = ValueError,
) -> None:
    """Raises `error` unless `x` has exactly `ndim` dimensions, named by `layout`."""
    if x.ndim != ndim:
        got = f"got {name} {short_type(x)}{_then(hint)}"
        raise error(f"{op}: {name} must be {layout}; {got}")


def check_min_ndim(op: str, name: str, x: Typed, ndim: int, layout: str) -> None:
    """Raises ValueError unless `x` has at least `ndim` dimensions, named by `layout`."""
    if x.ndim < ndim:
        raise ValueError(f"{op}: {name} must be {layout}; got {name} {short_type(x)}")


def check_count(op: str, what: str, count: int, got: object) -> None:
    """Raises ValueError unless int32 can number `count` things, such as rows.

    count: of a program for all sizes, a symbolic number, whose constraints must bound it.
    """
    hint = ""
    try:
        is_small = count < 2**31
    except jax.errors.InconclusiveDimensionOperation:
        is_small = False
        hint = 'Give jax.export.symbolic_shape a bound, such as constraints=["m <= 65536"].'
    if not is_small:
        got = got if isinstance(got, str) else short_type(got)
        raise ValueError(f"{op}: {what} must be below 2^31; got {count}, {got}{_then(hint)}")


def check_same_k(
    op: str, lhs: object, lhs_k: int, rhs: object, rhs_k: int, *, error: Error = ValueError
) -> None:
    """Raises `error` unless the contraction has the same length on both sides."""
    if lhs_k != rhs_k:
        shape: tuple[int, ...] = getattr(rhs, "shape", ())
        turned = "rhs.T" if len(shape) == 2 else "rhs.mT"
        hint = f"{turned} has k={lhs_k}." if len(shape) > 1 and lhs_k in shape[-2:] else ""
        raise error(
            f"{op}: lhs and rhs must share k; got k={lhs_k} in lhs {short_type(lhs)}, "
            f"k={rhs_k} in rhs {short_type(rhs)}{_then(hint)}"
        )


def check_out_dtype(op: str, name: str, dtype: AnyDType, dtypes: Sequence[np.dtype]) -> np.dtype:
    """Returns the requested dtype of the result. Raises TypeError unless it is one of `dtypes`."""
    got = short_repr(dtype)
    if dtype is not None and not is_array(dtype):
        try:
            got = short_dtype(dtype)
            found = jnp.dtype(dtype)
            if found == np.float64:
                found = jax.dtypes.canonicalize_dtype(found)
        except Exception:  # NumPy calls methods of `dtype`, and parses text
            found = None
        if found is not None and found in dtypes:
            return found
    raise TypeError(f"{op}: {name} must be {_short_dtypes(dtypes)}; got {got}")


def check_static(op: str, **values: object) -> None:
    """Raises TypeError if an argument that the program depends on is traced."""
    for name, value in values.items():
        for leaf in jax.tree.leaves(value):
            if is_tracer(leaf):
                raise TypeError(
                    f"{op}: {name} must be static; got a traced {short_type(leaf)}. Name it in "
                    "static_argnames of jax.jit, or bind it with functools.partial."
                )


def check_bool(op: str, **values: object) -> None:
    """Raises TypeError unless each of `values` is True or False."""
    check_static(op, **values)
    for name, value in values.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{op}: {name} must be True or False; got {short_repr(value)}")


def check_callable(op: str, function: object) -> None:
    """Raises TypeError unless `function` can be called."""
    if not callable(function):
        raise TypeError(f"{op}: function must be callable; got {short_repr(function)}")


def as_index(x: object) -> int | None:
    """Returns `x` as an int, or None if it is no integer."""
    try:
        return operator.index(x)  # pyright: ignore[reportArgumentType]  # which then raises
    except TypeError:
        return None


def _is_block(block: object) -> bool:
    return isinstance(block, tuple) and block in BLOCKS


def check_block(op: str, block: object, *, name: str = "block") -> None:
    """Raises ValueError unless `block` is one of the two supported scale blocks."""
    if not _is_block(block):
        raise ValueError(f"{op}: {name} must be (1, 128) or (128, 128); got {short_repr(block)}")


def check_implementation(op: str, implementation: object) -> None:
    """Raises ValueError unless `implementation` names an implementation."""
    # The type is checked first, because an array would compare element by element.
    if not isinstance(implementation, str | None) or implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation must be None, 'cuda', 'xla' or 'emulate'; "
            f"got {short_repr(implementation)}"
        )


def check_scaled(
    op: str, name: str, values: Typed, scale: Typed, block: tuple[int, int], *, hint: str = ""
) -> None:
    """Checks FP8 values (..., r, c) against f32 scales, one for each `block`.

    hint: what to do about a wrong scale, if the caller knows.
    """
    check_block(op, block, name=f"{name}.block")
    check_dtype(op, name, values, FP8_DTYPES)
    check_min_ndim(op, name, values, 2, "(..., r, c)")
    expected = scale_shape(values.shape, block)
    if tuple(scale.shape) != expected or jnp.dtype(scale.dtype) != jnp.float32:
        cut = (
            "If the shards of a shard_map were quantised each alone, cut the array at multiples "
            f"of {SCALE_BLOCK} elements, or quantise it outside."
        )
        is_larger = math.prod(scale.shape) > math.prod(expected)
        raise ValueError(
            f"{op}: {name}_scale must be f32[{','.join(map(str, expected))}] (one scale per "
            f"{block[0]}x{block[1]} block of {name} {short_type(values)}); got {short_type(scale)}"
            f"{_then(hint or (cut if is_larger else ''))}"
        )


def check_accumulator(
    op: str, accumulate_into: object, shape: tuple[int, ...], out_dtype: DTypeLike
) -> None:
    """Raises ValueError unless `accumulate_into` and the result are f32 and of the same shape."""
    expected = jax.ShapeDtypeStruct(shape, jnp.float32)
    if short_type(accumulate_into) != short_type(expected):
        raise ValueError(
            f"{op}: accumulate_into must be {short_type(expected)}; "
            f"got {short_type(accumulate_into)}"
        )
    if jnp.dtype(out_dtype) != jnp.float32:
        raise ValueError(
            f"{op}: accumulate_into must go with out_dtype float32; "
            f"got out_dtype {short_dtype(out_dtype)}"
        )


def check_pair(op: str, name: str, form: str, x: Any) -> tuple[Any, Any]:
    """Returns the two arrays of `x`; raises unless it is a pair, which `form` describes."""
    pair = cast(Sequence[Any], x) if isinstance(x, tuple | list) else ()
    if len(pair) != 2:
        raise ValueError(f"{op}: {name} must be None or {form}; got {short_repr(cast(object, x))}")
    return as_array(pair[0]), as_array(pair[1])
