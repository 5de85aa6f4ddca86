"""Ground truth of the numerics in NumPy, ml_dtypes and float64; imports nothing of the package.

Quantisation is exact to the bit: `quantize` does the very f32 operations that define a scale and
a value. Products are exact up to float64: `gemm` and `matmul_vjp` dequantise and multiply in
float64, so a kernel's f32 result differs from them by its accumulation error only. The bits of
that result are the business of `bit_model.py`.
"""

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

SCALE_BLOCK = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FORMAT_MAX = {E4M3: 448.0, E5M2: 57344.0}
# Keeps scale and 1 / scale normal, and sends every f32 denormal to zero, flushed or not.
SMALLEST_AMAX = np.float32(2.0**-92)
NAN_SCALE = np.uint32(0x7FC00000)
NAN_VALUE = np.uint8(0x7F)  # a NaN in e4m3fn and in e5m2

Quantized = tuple[np.ndarray, NDArray[np.float32]]


def num_blocks(extent: int) -> int:
    """Number of scale blocks that cover `extent` elements."""
    return -(-extent // SCALE_BLOCK)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scale of values (..., r, c): one scale a block, ragged edges counted."""
    *batch, r, c = shape
    return (*batch, -(-r // block[0]), -(-c // block[1]))


def _spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Repeats the scale of every block to one entry an element of `shape`."""
    rows = np.repeat(scale, block[0], axis=-2)[..., : shape[-2], :]
    return np.repeat(rows, block[1], axis=-1)[..., : shape[-1]]


def _amax(x: NDArray[np.float32], block: tuple[int, int]) -> NDArray[np.float32]:
    """Largest magnitude of each block of x (..., r, c); NaN where the block holds a NaN."""
    *batch, r, c = x.shape
    blocks_r, blocks_c = scale_shape(x.shape, block)[-2:]
    padded = np.zeros((*batch, blocks_r * block[0], blocks_c * block[1]), np.float32)
    padded[..., :r, :c] = np.abs(x)
    return padded.reshape(*batch, blocks_r, block[0], blocks_c, block[1]).max(axis=(-3, -1))


def _power_of_two_at_least(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = scale.view(np.uint32)
    return np.where(bits & 0x7FFFFF, (bits & 0x7F800000) + 0x800000, bits).view(np.float32)


def quantize(
    x: ArrayLike,
    block: tuple[int, int] = (1, 128),
    axis: int = -1,
    fmt: DTypeLike = E4M3,
    pow2: bool = False,
) -> Quantized:
    """Quantises x (..., r, c) to FP8 with one f32 scale a block: real = value * scale.

    Args:
      x: bf16, f16 or f32; upcast to f32 exactly.
      block: (1, 128) or (128, 128).
      axis: -1, or -2 for blocks along m: the result is then that of x^T along its last axis.
      fmt: float8_e4m3fn or float8_e5m2.
      pow2: round each scale up to a power of two.
    Returns:
      values, of x's shape (x^T's for axis=-2), and scale f32 of `scale_shape(values.shape, block)`.
    """
    fmt = np.dtype(fmt)
    x = np.asarray(x).astype(np.float32)
    if axis == -2:
        x = np.ascontiguousarray(np.swapaxes(x, -1, -2))
    fmax = np.float32(FORMAT_MAX[fmt])
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        amax = _amax(x, block)
        finite = np.isfinite(amax)
        scale = np.maximum(np.where(finite, amax, 0), SMALLEST_AMAX) / fmax
        if pow2:
            scale = _power_of_two_at_least(scale)
        inverse = np.float32(1) / scale
        scaled = np.where(np.isfinite(x), x, 0) * _spread(inverse, x.shape, block)
        values = np.clip(scaled, -fmax, fmax).astype(fmt)
    values.view(np.uint8)[~_spread(finite, x.shape, block)] = NAN_VALUE
    scale.view(np.uint32)[~finite] = NAN_SCALE
    return values, scale


def block_of(values_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int]:
    """The scale block that two shapes imply: 1x128 has one row of scales for each row."""
    return (1, 128) if scale_shape[-2] == values_shape[-2] else (128, 128)


def dequantize(
    values: ArrayLike, scale: ArrayLike, block: tuple[int, int] | None = None
) -> NDArray[np.float64]:
    """value * scale in float64 (exact); the block follows from the shapes where it is not given."""
    values, scale = np.asarray(values), np.asarray(scale)
    block = block or block_of(values.shape, scale.shape)
    return values.astype(np.float64) * _spread(scale.astype(np.float64), values.shape, block)


def gemm(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    accum: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """(accum +) dequantised lhs (m, k) times dequantised rhs (n, k), transposed, in float64.

    lhs_scale is (m, kb); rhs_scale is (nb, kb) for 1d2d or (n, kb) for 1d1d.
    """
    out = dequantize(lhs, lhs_scale) @ dequantize(rhs, rhs_scale).T
    return out if accum is None else out + np.asarray(accum).astype(np.float64)


def fake_quantize(x: ArrayLike, *args, **kwargs) -> NDArray[np.float64]:
    """quantize, then dequantize: what is left of x, in float64."""
    block = kwargs.get("block", args[0] if args else (1, 128))
    return dequantize(*quantize(x, *args, **kwargs), block)


def matmul_vjp(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dout: ArrayLike | None = None,
    *,
    fwd: DTypeLike = E4M3,
    bwd: DTypeLike = E4M3,
    pow2: bool = False,
    fp8_drhs: bool = True,
    drhs_lhs_block: tuple[int, int] = (1, 128),
) -> tuple[NDArray[np.float64], ...]:
    """The FP8 matmul of lhs (m, k) and rhs (k, n), and its gradients for dout (m, n), in float64.

    out  = lhs (1x128 along k) . rhs (128x128)
    dlhs = dout (1x128 along n) . rhs^T (the same 128x128 values)
    drhs = lhs^T (drhs_lhs_block) . dout (1x128 along m), or of both in bf16 if not fp8_drhs
    lhs and rhs have format fwd, dout has bwd.
    """
    rhs_fq = fake_quantize(rhs, (128, 128), fmt=fwd, pow2=pow2)
    out = fake_quantize(lhs, fmt=fwd, pow2=pow2) @ rhs_fq
    if dout is None:
        return (out,)
    dlhs = fake_quantize(dout, fmt=bwd, pow2=pow2) @ rhs_fq.T
    if fp8_drhs:
        lhs_t = fake_quantize(np.asarray(lhs).T, drhs_lhs_block, fmt=fwd, pow2=pow2)
        dout_t = fake_quantize(dout, axis=-2, fmt=bwd, pow2=pow2)
    else:
        in_bf16 = lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)
        lhs_t, dout_t = in_bf16(lhs).T, in_bf16(dout).T
    return out, dlhs, lhs_t @ dout_t.T


def calc_diff(x: ArrayLike, y: ArrayLike) -> float:
    """DeepGEMM's distance, 1 - 2 <x, y> / (<x, x> + <y, y>), in float64; NaN if either has one."""
    x, y = np.asarray(x).astype(np.float64).ravel(), np.asarray(y).astype(np.float64).ravel()
    denominator = x @ x + y @ y
    return 0.0 if denominator == 0 else float(1 - 2 * (x @ y) / denominator)


def assert_same_bits(actual: ArrayLike, expected: ArrayLike, what: str = "") -> None:
    """Shapes, dtypes and every bit equal (so NaN payloads and the signs of zeros too)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    found = (actual.dtype, actual.shape)
    assert found == (expected.dtype, expected.shape), (what, found, expected.dtype, expected.shape)
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    a, e = (np.ascontiguousarray(t).view(bits) for t in (actual, expected))
    if not np.array_equal(a, e):
        where = np.argwhere(a != e)
        i = tuple(map(int, where[0]))
        raise AssertionError(
            f"{what}: {len(where)} of {a.size} elements differ; first at {i}: "
            f"{actual[i]} ({a[i]:#x}), expected {expected[i]} ({e[i]:#x})"
        )


def row_ranges(group_sizes: ArrayLike, m: int, first_row: int = 0) -> list[tuple[int, int]]:
    """First row of each group and the row after its last, one group after another, within 0..m."""
    start = min(max(first_row, 0), m)
    ranges = []
    for size in map(int, np.asarray(group_sizes)):
        end = min(start + max(size, 0), m)
        ranges.append((start, end))
        start = end
    return ranges


def quantize_ragged(
    x: ArrayLike,
    group_sizes: ArrayLike,
    fmt: DTypeLike = E4M3,
    pow2: bool = False,
    first_row: int = 0,
    block: tuple[int, int] = (1, 128),
) -> Quantized:
    """quantize(axis=-2) of each group of rows of x (m, k) alone, each at a multiple of 128 columns.

    Returns values (k, t) and scale (k, t / 128), t = (m + 127 g) // 128 * 128. The rest of a
    group's last block counts as zeros, as do blocks of no group. With block (128, 128) the scale is
    (k / 128, t / 128).
    """
    x = np.asarray(x)
    m, k = x.shape
    t = (m + 127 * np.size(group_sizes)) // SCALE_BLOCK * SCALE_BLOCK
    values, scale = quantize(np.zeros((k, t), np.float32), block, fmt=fmt, pow2=pow2)
    first = 0
    for start, end in row_ranges(group_sizes, m, first_row):
        padded = np.pad(x[start:end], ((0, (start - end) % SCALE_BLOCK), (0, 0)))
        group_values, group_scale = quantize(padded.T, block, fmt=fmt, pow2=pow2)
        values[:, first * SCALE_BLOCK :][:, : len(padded)] = group_values
        scale[:, first:][:, : group_scale.shape[1]] = group_scale
        first += group_scale.shape[1]
    return values, scale


def grouped_gemm(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    group_sizes: ArrayLike,
    first_row: int = 0,
) -> NDArray[np.float64]:
    """gemm of each group of rows of lhs (m, k) with its own rhs[i] (n, k); zeros elsewhere."""
    lhs, lhs_scale, rhs, rhs_scale = map(np.asarray, (lhs, lhs_scale, rhs, rhs_scale))
    out = np.zeros((lhs.shape[0], rhs.shape[1]))
    for i, (start, end) in enumerate(row_ranges(group_sizes, lhs.shape[0], first_row)):
        out[start:end] = gemm(lhs[start:end], lhs_scale[start:end], rhs[i], rhs_scale[i])
    return out


def grouped_wgrad(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    lhs_fmt: DTypeLike = E4M3,
    rhs_fmt: DTypeLike = E4M3,
    lhs_block: tuple[int, int] = (1, 128),
) -> NDArray[np.float64]:
    """lhs^T . rhs over the rows of each group, both quantised along them: (g, k, n) in float64."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    out = np.zeros((np.size(group_sizes), lhs.shape[1], rhs.shape[1]))
    for i, (start, end) in enumerate(row_ranges(group_sizes, lhs.shape[0])):
        lhs_t = fake_quantize(lhs[start:end].T, lhs_block, fmt=lhs_fmt)
        out[i] = lhs_t @ fake_quantize(rhs[start:end], axis=-2, fmt=rhs_fmt).T
    return out
