"""quantize_p: rounds an array to FP8, with one f32 scale for each block.

    scale = max |x of the block| / largest FP8 value        value = round(x * (1 / scale))

_data/rounding.py defines both to the bit, and is the reference. The mode says which blocks x
(..., m, k) has and what is returned:

    "row"               1x128 blocks along k; values (..., m, k)
    "column"            1x128 blocks along m; values (k, ..., m), as a sum over all rows reads them
    "row_column"        both of these
    "block"             128x128 blocks; values (..., m, k)
    "block_transposed"  128x128 blocks; values (..., k, m)
    "block_both"        128x128 blocks; values (..., m, k), then (..., k, m)
    "row_block_transposed"  those of "row"; and 128x128 blocks, values (k, ..., m)

With `padded`, the last dimension of values is rounded up to a multiple of 128. Zeros fill it, or
NaN where the block is NaN. The rows of a product's operands then start at lines of the L2.

The blocks are those of the DeepSeek-V3 report, section 3.3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.rounding import block_types
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.batch import map_batch
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._primitives.quantize_args import QuantizeArgs, bind_in_mode, keep_used_axes
from jax_fp8gemm._primitives.quantize_blocks import quantize_blocks
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._sharding.rule import PartitionRule
from jax_fp8gemm._tuning import quantize_config

_BLOCK = formats.SCALE_BLOCK
# The largest batch of one launch is CUDA's largest second extent of a grid.
_MAX_BATCH = 65535


@jax.named_scope("fp8gemm_quantize")
def quantize_in_mode(
    x: ArrayLike, mode: str, padded: bool = False, **args: Unpack[QuantizeArgs]
) -> tuple[ScaledArray, ...]:
    """Quantises x (..., m, k) without checks. Modes of rows and columns have two results.

    padded: whether the last dimension of values is rounded up to whole scale blocks.
    """
    x = jnp.asarray(x)
    padded = padded and bool(_unfilled_dims(x, mode))
    return bind_in_mode(partial(quantize_p, padded=padded), [x], mode, args)


def quantize_rows(x: ArrayLike, padded: bool = False, **args: Unpack[QuantizeArgs]) -> ScaledArray:
    """Quantises x (..., m, k) along k."""
    return quantize_in_mode(x, "row", padded, **args)[0]


def rows_and_columns(
    x: ArrayLike,
    column_block: tuple[int, int] = (1, _BLOCK),
    padded: bool = False,
    **args: Unpack[QuantizeArgs],
) -> tuple[ScaledArray, ScaledArray]:
    """Quantises x (..., m, k) along k, (..., m, k), and along m, (k, ..., m), in one read.

    column_block: the scale block of the latter, (1, 128) or (128, 128). padded: of both.
    """
    mode = modes.of_columns(column_block, with_rows=True)
    rows, columns = quantize_in_mode(x, mode, padded, **args)
    return rows, columns


def quantize_transposed(
    x: ArrayLike, padded: bool = False, **args: Unpack[QuantizeArgs]
) -> ScaledArray:
    """Returns quantize(x, block=(128, 128)).T, and does not store the untransposed values."""
    return quantize_in_mode(x, "block_transposed", padded, **args)[0]


def _unfilled_dims(x, mode: str) -> str:
    """Returns those of "m" and "k" that are last in values of the mode, and end within a block."""
    extents = dict(m=x.shape[-2], k=x.shape[-1])
    is_unfilled = lambda extent: isinstance(extent, int) and extent % _BLOCK != 0
    return "".join(name for name in modes.last_dims(mode) if is_unfilled(extents[name]))


def _shape_rule(
    x, *, mode: str, e5m2: bool, pow2_scale: bool, padded: bool
) -> list[jax.ShapeDtypeStruct]:
    results = _unpadded_types(x, mode=mode, e5m2=e5m2, pow2_scale=pow2_scale)
    for i, result in enumerate(results if padded else ()):
        if result.dtype != jnp.float32:
            last = formats.num_blocks(result.shape[-1]) * _BLOCK
            results[i] = jax.ShapeDtypeStruct((*result.shape[:-1], last), result.dtype)
    return results


def _unpadded_types(x, *, mode: str, e5m2: bool, pow2_scale: bool) -> list[jax.ShapeDtypeStruct]:
    checks.check_min_ndim("quantize", "x", x, 2, "(..., m, k)")
    *batch, m, k = x.shape
    *front, last = [k, *batch]
    rows, columns = block_types(m, k, 1, e5m2, batch), block_types(last, m, 1, e5m2, front)
    values, scale = block_types(m, k, _BLOCK, e5m2, batch)
    transposed = block_types(k, m, _BLOCK, e5m2, batch)
    # The same with k in front of the batch.
    squares = [
        jax.ShapeDtypeStruct((t.shape[-2], *batch, t.shape[-1]), t.dtype) for t in transposed
    ]
    return {
        "row": rows,
        "column": columns,
        "row_column": rows + columns,
        "block": [values, scale],
        "block_transposed": transposed,
        "block_both": [values, transposed[0], scale],
        "row_block_transposed": rows + squares,
    }[mode]


def _reference(x, *, mode: str, e5m2: bool, pow2_scale: bool, padded: bool) -> list[jax.Array]:
    if padded:
        return _padded_reference(x, mode=mode, e5m2=e5m2, pow2_scale=pow2_scale)
    run = partial(quantize_blocks, x, e5m2=e5m2, pow2_scale=pow2_scale)
    if mode in modes.SQUARE:
        values, scale = run(block_m=_BLOCK, is_transposed=mode == "block_transposed")
        return [values, values.mT, scale] if mode == "block_both" else [values, scale]
    rows, columns = modes.split(mode)
    block_m = _BLOCK if modes.has_square_columns(mode) else 1
    transposed = run(block_m=block_m, is_transposed=True) if columns else ()
    return [
        *(run(block_m=1) if rows else ()),
        *(jnp.moveaxis(y, -2, 0) for y in transposed),
    ]


def _padded_reference(x, **params: Any) -> list[jax.Array]:
    """Quantises `x` with zeros behind m and k, and leaves out the rows of zeros."""
    ends = [(0, 0)] * (x.ndim - 2) + [(0, -extent % _BLOCK) for extent in x.shape[-2:]]
    filled = _reference(jnp.pad(x, ends), **params, padded=False)
    types = _shape_rule(x, **params, padded=True)
    return [y[tuple(map(slice, t.shape))] for y, t in zip(filled, types, strict=True)]


def ffi_call(x, *, mode: str, e5m2: bool, pow2_scale: bool, padded: bool) -> list[jax.Array]:
    params: dict[str, Any] = dict(mode=mode, e5m2=e5m2, pow2_scale=pow2_scale, padded=padded)
    results = _shape_rule(x, **params)
    if x.size == 0:
        return _reference(x, **params)
    if x.ndim > (3 if mode in modes.SQUARE else 2):
        folded = _call_folded(partial(ffi_call, **params), x, mode)
        return [y.reshape(result.shape) for y, result in zip(folded, results, strict=True)]
    batch = x.shape[0]
    # The kernel refuses a symbolic batch that turns out to be larger.
    if x.ndim == 3 and isinstance(batch, int) and batch > _MAX_BATCH:
        starts = range(0, batch, _MAX_BATCH)
        parts = [ffi_call(x[i : i + _MAX_BATCH], **params) for i in starts]
        return [jnp.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    # 1x128 scales are (rows, blocks) with rows minor, for the gemm kernel reads them along rows.
    row_major, column_major = tuple(range(x.ndim)), (1, 0)
    layouts = [column_major if r.dtype == jnp.float32 else row_major for r in results]
    if mode in modes.SQUARE or modes.has_square_columns(mode):
        layouts[-1] = row_major
    config = quantize_config.attributes(
        mode, x.dtype, e5m2=e5m2, pow2_scale=pow2_scale, is_padded=padded
    )
    call = jax.ffi.ffi_call(
        extension.QUANTIZE_TARGET,
        results,
        input_layouts=[row_major],
        output_layouts=layouts,
    )
    return list(call(x, config=config))


def _call_folded(call, x, mode: str) -> Sequence[jax.Array]:
    """Folds the leading dimensions of `x` into one, and calls the kernel.

    The kernel for squares takes this one dimension. For other modes it is folded into m, or the
    kernel runs for one element after another if a scale block would span two of them.
    """
    *batch, m, k = x.shape
    matrices = x.reshape(math.prod(batch), m, k)
    if mode in modes.SQUARE:
        return call(matrices)
    if mode == "row" or m % _BLOCK == 0:
        return call(matrices.reshape(-1, k))
    results = map_batch(call, [matrices], [0])
    return [jnp.moveaxis(y, 0, d) for y, d in zip(results, _BATCH_DIMS[mode], strict=True)]


# For each result, the dimension that is the first of x.
_BATCH_DIMS = {
    "row": [0, 0],
    "column": [1, 1],
    "row_column": [0, 0, 1, 1],
    "block": [0, 0],
    "block_transposed": [0, 0],
    "block_both": [0, 0, 0],
    "row_block_transposed": [0, 0, 1, 1],
}


def _batch_rule(operands, dims, *, mode: str, **params):
    x = jnp.moveaxis(operands[0], dims[0], 0)
    return quantize_p(x, mode=mode, **params), _BATCH_DIMS[mode]


def _dce_rule(used, *, mode: str, **params) -> tuple[dict[str, Any], Sequence[int]]:
    """Leaves out the transposed values of squares, or one of two axes, if nothing uses them."""
    if mode == "block_both" and not used[1]:
        return dict(params, mode="block"), (0, 2)
    if mode == "row_block_transposed" and any(used[2:]):
        return dict(params, mode=mode), range(len(used))  # no mode has such columns alone
    return keep_used_axes(used, mode=mode, **params)


def _partition_rule(x, *, mode: str, e5m2: bool, pow2_scale: bool, padded: bool) -> PartitionRule:
    batch = "".join(f"b{i} " for i in range(x.ndim - 2))
    rows, columns, transposed = f"{batch}m k", f"k {batch}m", f"{batch}k m"
    results = {
        "row": (rows, rows),
        "column": (columns, columns),
        "row_column": (rows, rows, columns, columns),
        "block": (rows, rows),
        "block_transposed": (transposed, transposed),
        "block_both": (rows, transposed, rows),
        "row_block_transposed": (rows, rows, columns, columns),
    }[mode]
    blocked = {"row": "k", "column": "m"}.get(mode, "mk")
    uncut = tuple(_unfilled_dims(x, mode)) if padded else ()
    return PartitionRule((rows,), results, dict.fromkeys(blocked, _BLOCK), uncut=uncut)


quantize_p = define_primitive(
    "jax_fp8gemm_quantize",
    _shape_rule,
    Forms(_reference, ffi_call),
    batch_rule=_batch_rule,
    dce_rule=_dce_rule,
    mesh_rules=MeshRules(_partition_rule),
)
