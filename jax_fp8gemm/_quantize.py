"""quantize: bf16, f16 or f32 to FP8 with one f32 scale a block.

Per block, in f32, every step correctly rounded, so that CUDA, XLA and NumPy agree to the bit:

    amax  = max |x|, never below 2^-92   so scale and 1 / scale are normal numbers, and an x that
                                         flush-to-zero would change becomes zero either way
    scale = amax / FMAX                  448 for e4m3fn, 57344 for e5m2
    scale = 2 ^ ceil(log2 scale)         with pow2_scale
    value = round(x * (1 / scale))       to nearest even on the FP8 grid, saturating at FMAX

A block with an Inf or a NaN becomes NaN: scale 0x7fc00000, values 0x7f. Ragged edges count as
zeros and are not stored. Scale of DeepSeek-V3 (report, section 3.3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm import _checks, _ffi
from jax_fp8gemm._primitive import define_primitive, map_batch, replicate
from jax_fp8gemm._scaled_array import ScaledArray

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Implementation = Literal["cuda", "xla"] | None

# In the order of the kernel's `mode` attribute.
MODES = ("row", "column", "row_column", "block", "block_transposed", "block_both")
_BLOCK = _checks.SCALE_BLOCK
_SMALLEST_AMAX_BITS = np.uint32((127 - 92) << 23)
_INF_BITS = np.uint32(0x7F800000)
_NAN_BITS = np.uint32(0x7FC00000)
_IMPLICIT_BIT = np.uint32(1 << 23)
_MANTISSA_MASK = np.uint32((1 << 23) - 1)
# FMAX = 7 * 2^p in both formats, so a scale is an exact division by 7 and a shift.
_FMAX_SHIFT = {"float8_e4m3fn": 6, "float8_e5m2": 13}


def quantize(
    x: Float[Array, "*batch m k"],
    *,
    block: tuple[int, int] = (1, 128),
    axis: int = -1,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    with_transpose: bool = False,
    implementation: Implementation = None,
) -> ScaledArray:
    """Quantises `x` to FP8 with one scale a block; ScaledArray.dequantize undoes it.

    Args:
      x: (..., m, k) bf16, f16 or f32; any m and k.
      block: (1, 128): 128 neighbours along `axis` share a scale. (128, 128): squares do.
      axis: -1, or -2 for scale blocks along m: the result is then that of x^T, (..., k, m) with
        scale (..., k, ceil(m / 128)), as a contraction over m reads it. -1 with square blocks.
      dtype: float8_e4m3fn or float8_e5m2.
      pow2_scale: round each scale up to a power of two; scaling is then exact.
      with_transpose: also store the transposed values, from the same read; square blocks only.
      implementation: None, the kernel where it can run and the reference elsewhere, with one
        warning; "cuda", the kernel or an error; "xla", the reference. All give the same bits.
    Returns:
      ScaledArray of the values and f32 scales. A block with an Inf or a NaN is NaN throughout.
      Not differentiable.
    Raises:
      TypeError: dtype of x, or `dtype`. ValueError: rank, block, axis, with_transpose.
      RuntimeError: implementation="cuda" where the kernel cannot run.
    """
    op = "quantize"
    _check_operand(op, x, dtype, implementation)
    _checks.check_block(op, block)
    if axis not in range(-x.ndim, x.ndim):
        raise ValueError(f"{op}: axis must be -1 or -2; got {axis}, x {_checks.short_type(x)}")
    axis = axis - x.ndim if axis >= 0 else axis
    if axis != -1 and (axis != -2 or block != (1, 128)):
        raise ValueError(
            f"{op}: axis must be -1, or -2 with block (1, 128); got axis {axis}, block {block}, "
            f"x {_checks.short_type(x)}"
        )
    if with_transpose and block != (128, 128):
        raise ValueError(
            f"{op}: with_transpose must go with block (128, 128); got block {block}. "
            "For 1x128 blocks along rows and columns use quantize_both."
        )
    square = "block_both" if with_transpose else "block"
    mode = square if block == (128, 128) else {-1: "row", -2: "column"}[axis]
    results = _run(x, mode, dtype, pow2_scale, implementation)
    transposed = results[1] if with_transpose else None
    return ScaledArray(results[0], results[-1], transposed, block)


def quantize_both(
    x: Float[Array, "*batch m k"],
    *,
    dtype: Any = jnp.float8_e4m3fn,
    pow2_scale: bool = False,
    implementation: Implementation = None,
) -> tuple[ScaledArray, ScaledArray]:
    """Quantises `x` along its rows and along its columns in one read of it.

    Args: as for `quantize`.
    Returns:
      quantize(x, axis=-1) of shape (..., m, k), and quantize(x, axis=-2) of shape (..., k, m).
    """
    _check_operand("quantize_both", x, dtype, implementation)
    rows, row_scale, columns, column_scale = _run(
        x, "row_column", dtype, pow2_scale, implementation
    )
    return ScaledArray(rows, row_scale), ScaledArray(columns, column_scale)


def quantize_transposed(
    x: Float[Array, "*batch k n"], *, dtype: Any, pow2_scale: bool, implementation: Implementation
) -> ScaledArray:
    """quantize(x, block=(128, 128)).T without storing the untransposed values."""
    values, scale = _run(x, "block_transposed", dtype, pow2_scale, implementation)
    return ScaledArray(values, scale, None, (128, 128))


def _check_operand(op: str, x: Any, dtype: Any, implementation: Any) -> None:
    _checks.check_array(op, "x", x)
    _checks.check_dtype(op, "x", x, _checks.FLOAT_DTYPES)
    _checks.check_min_ndim(op, "x", x, 2, "(..., m, k)")
    _checks.check_out_dtype(op, "dtype", dtype, _checks.FP8_DTYPES)
    _checks.check_implementation(op, implementation)


@jax.named_scope("fp8gemm_quantize")
def _run(x, mode: str, dtype, pow2_scale: bool, implementation) -> list[jax.Array]:
    """Binds the primitive, with the leading dimensions of `x` folded into one that is mapped."""
    params = dict(
        mode=mode,
        e5m2=jnp.dtype(dtype) == jnp.float8_e5m2,
        pow2_scale=bool(pow2_scale),
        implementation=implementation,
    )
    x = replicate(jnp.asarray(x))
    if x.ndim == 2:
        return quantize_p(x, **params)
    results = jax.vmap(lambda x: quantize_p(x, **params))(x.reshape(-1, *x.shape[-2:]))
    return [result.reshape(*x.shape[:-2], *result.shape[1:]) for result in results]


def _shape_rule(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.ShapeDtypeStruct]:
    _checks.check_ndim("quantize", "x", x, 2, "(m, k)")
    m, k = x.shape
    values = lambda *shape: jax.ShapeDtypeStruct(shape, _fp8(e5m2))
    scale = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    mb, kb = _checks.num_blocks(m), _checks.num_blocks(k)
    return {
        "row": [values(m, k), scale(m, kb)],
        "column": [values(k, m), scale(k, mb)],
        "row_column": [values(m, k), scale(m, kb), values(k, m), scale(k, mb)],
        "block": [values(m, k), scale(mb, kb)],
        "block_transposed": [values(k, m), scale(kb, mb)],
        "block_both": [values(m, k), values(k, m), scale(mb, kb)],
    }[mode]


def _reference(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    x = x.astype(jnp.float32)
    rows = lambda x: _quantize_blocks(x, 1, e5m2, pow2_scale)
    if mode == "row":
        return rows(x)
    if mode == "column":
        return rows(x.T)
    if mode == "row_column":
        return rows(x) + rows(x.T)
    values, scale = _quantize_blocks(x, _BLOCK, e5m2, pow2_scale)
    return {
        "block": [values, scale],
        "block_transposed": [values.T, scale.T],
        "block_both": [values, values.T, scale],
    }[mode]


def _quantize_blocks(x, block_m: int, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    """Quantises f32 (m, k) with one scale for each block_m x 128 block."""
    m, k = x.shape
    padded = jnp.pad(x, ((0, -m % block_m), (0, -k % _BLOCK)))
    mb, kb = padded.shape[0] // block_m, padded.shape[1] // _BLOCK
    blocks = padded.reshape(mb, block_m, kb, _BLOCK)
    # The bits of non-negative floats order as the floats do, with NaN above Inf.
    amax = jnp.max(lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32), axis=(1, 3))
    scale, reciprocal = _scale_of(amax, e5m2, pow2_scale)
    # Keeps the scales from being computed again for every value.
    scale, reciprocal = lax.optimization_barrier((scale, reciprocal))
    is_nan = jnp.isnan(scale)[:, None, :, None]
    values = _round_to_fp8(blocks * reciprocal[:, None, :, None], e5m2)
    nan = lax.bitcast_convert_type(jnp.uint8(0x7F), values.dtype)
    values = jnp.where(is_nan, nan, values)
    return [values.reshape(padded.shape)[:m, :k], scale]


def _scale_of(amax_bits, e5m2: bool, pow2_scale: bool) -> tuple[jax.Array, jax.Array]:
    """Scale and its reciprocal, both correctly rounded, from the bits of amax.

    NOTE: in integers, because XLA's f32 division is not IEEE on GPU (div.full, 2 ulp), and XLA
    turns a division by a constant into a multiplication.
    """
    bits = jnp.maximum(amax_bits, _SMALLEST_AMAX_BITS)
    mantissa = (bits & _MANTISSA_MASK) | _IMPLICIT_BIT
    exponent = bits >> 23
    # mantissa / 7 * 2^3 has 24 bits, or 25 where mantissa >= 7 * 2^21: then one shift less.
    is_large = mantissa >= np.uint32(7 << 21)
    numerator = mantissa << jnp.where(is_large, np.uint32(2), np.uint32(3))
    quotient = numerator // np.uint32(7)
    quotient += (numerator - quotient * np.uint32(7) >= np.uint32(4)).astype(jnp.uint32)
    shift = np.uint32(3 + _FMAX_SHIFT[_fp8(e5m2).name])
    exponent = exponent - shift + is_large.astype(jnp.uint32)
    # Addition, not |: a quotient rounded up to 2^24 carries into the exponent.
    scale = (exponent << 23) + (quotient - _IMPLICIT_BIT)
    if pow2_scale:
        scale = (scale + _MANTISSA_MASK) & ~_MANTISSA_MASK
    reciprocal = _reciprocal_bits(scale)
    is_bad = amax_bits >= _INF_BITS
    as_float = lambda bits: lax.bitcast_convert_type(
        jnp.where(is_bad, _NAN_BITS, bits), jnp.float32
    )
    return as_float(scale), as_float(reciprocal)


def _reciprocal_bits(bits) -> jax.Array:
    """Bits of 1 / x rounded to nearest, for the bits of a normal positive x with normal 1 / x.

    With x = mantissa * 2^e the wanted 24-bit integer is 2^47 / mantissa, rounded. A float division
    that is 3 ulp off at worst gives a guess; the remainder of the guess, exact modulo 2^32, says
    by how much to move it. No ties: 2^48 = mantissa * odd only where mantissa is a power of two.
    """
    mantissa = (bits & _MANTISSA_MASK) | _IMPLICIT_BIT
    base = (np.uint32(253) - (bits >> 23)) << 23
    x = lax.bitcast_convert_type(bits, jnp.float32)
    guess = lax.bitcast_convert_type(1.0 / x, jnp.uint32) - base + _IMPLICIT_BIT
    remainder = lax.bitcast_convert_type(np.uint32(0) - mantissa * guess, jnp.int32)
    signed = lax.bitcast_convert_type(mantissa, jnp.int32)
    for odd in (1, 3, 5):
        guess += (2 * remainder > odd * signed).astype(jnp.uint32)
        guess -= (2 * remainder < -odd * signed).astype(jnp.uint32)
    is_power_of_two = mantissa == _IMPLICIT_BIT
    return jnp.where(is_power_of_two, base + _IMPLICIT_BIT, base + (guess - _IMPLICIT_BIT))


def _round_to_fp8(x, e5m2: bool) -> jax.Array:
    """Rounds f32 to FP8, to nearest even, saturating; NaN becomes some NaN.

    NOTE: not by astype alone: XLA may round f32 to FP8 twice, through f16. After the rounding to
    the grid in f32 below, astype is exact.
    """
    info = jnp.finfo(_fp8(e5m2))
    x = jnp.clip(x, -float(info.max), float(info.max))
    step = float(info.smallest_subnormal)
    subnormal = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    x = jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, normal)
    return x.astype(_fp8(e5m2))


def _fp8(e5m2: bool):
    return jnp.dtype(jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn)


def _ffi_call(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.Array]:
    params = dict(mode=mode, e5m2=e5m2, pow2_scale=pow2_scale)
    results = _shape_rule(x, **params)
    if x.size == 0:
        return _reference(x, **params)
    # A 1x128 scale is (rows, blocks) with rows minor: the gemm kernel reads it along the rows.
    row_major, column_major = (0, 1), (1, 0)
    layouts = {"row": [0, 1], "column": [0, 1], "row_column": [0, 1, 0, 1]}.get(mode, [])
    config = dict(
        mode=np.int32(MODES.index(mode)),
        e5m2=np.int32(e5m2),
        pow2_scale=np.int32(pow2_scale),
        num_sms=np.int32(_ffi.num_sms()),
    )
    call = jax.ffi.ffi_call(
        _ffi.QUANTIZE_TARGET,
        results,
        input_layouts=[row_major],
        output_layouts=[column_major if flag else row_major for flag in layouts]
        or [row_major] * len(results),
    )
    return list(call(x, config=config))


def _batch_rule(operands, dims, *, mode: str, **params):
    """Folds the batch into m where no scale block then spans two elements; else one by one."""
    x = jnp.moveaxis(operands[0], dims[0], 0)
    batch, m, k = x.shape
    if mode != "row" and m % _BLOCK:
        results = map_batch(lambda x: quantize_p(x, mode=mode, **params), [x], [0])
        return results, [0] * len(results)
    results = quantize_p(x.reshape(batch * m, k), mode=mode, **params)
    params.pop("implementation")
    elements = _shape_rule(jax.ShapeDtypeStruct((m, k), x.dtype), mode=mode, **params)
    unfolded = [
        _unfold(result, batch, element.shape, is_transposed)
        for result, element, is_transposed in zip(results, elements, _TRANSPOSED[mode], strict=True)
    ]
    return unfolded, [0] * len(results)


# Whether m is the last dimension of each result rather than the first.
_TRANSPOSED = {
    "row": (False, False),
    "column": (True, True),
    "row_column": (False, False, True, True),
    "block": (False, False),
    "block_transposed": (True, True),
    "block_both": (False, True, False),
}


def _unfold(x, batch: int, shape: tuple[int, int], is_transposed: bool) -> jax.Array:
    if is_transposed:
        return jnp.moveaxis(x.reshape(shape[0], batch, shape[1]), 1, 0)
    return x.reshape(batch, *shape)


quantize_p = define_primitive(
    "jax_fp8gemm_quantize",
    shape_rule=_shape_rule,
    reference=_reference,
    ffi_call=_ffi_call,
    batch_rule=_batch_rule,
)
