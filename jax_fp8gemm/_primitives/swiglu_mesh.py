"""How a mesh cuts swiglu_quantize and swiglu_grad_quantize (swiglu_quantize.py).

Without groups a mesh may cut rows, and columns with them, between scale blocks.

The gate and up of a feature must be on one device. With gate | up in one piece no mesh axis cuts
the features, and the compiler gathers them. In several pieces an axis may cut between these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import lax

from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gated import in_pieces, without_pieces
from jax_fp8gemm._sharding.partition import Shards
from jax_fp8gemm._sharding.rule import PartitionRule, Shaped


def partition_rule(*operands, mode: str, pieces: int, **params) -> PartitionRule:
    """Rows stay on their device. Columns are cut so that gate and up of a feature stay together.

    So are features, "f": between pieces, if there are several. All arrays have a part for each.
    """
    is_grad, is_cut = len(operands) % 2 == 0, pieces > 1
    rows, columns = modes.split(mode)
    if len(operands) < 3:
        return _rule_of_all_rows(operands, is_grad, is_cut, mode, pieces)
    w = "f" if is_cut else "w"
    row_dims, column_dims = (f"t {w}", f"{w} tokens") if is_grad else ("t f", "c tokens")
    blocks = {"c": SCALE_BLOCK} if modes.has_square_columns(mode) else {}
    if is_cut:
        blocks["f"] = operands[0].shape[1] // pieces
    of_columns = {"c": ("f", "t") if is_cut else ("t",)}
    return PartitionRule(
        (f"t {w}", *["t f"] * is_grad, "sizes", "first"),
        (row_dims,) * (2 if rows else 0) + (column_dims,) * (2 if columns else 0),
        blocks,
        uncut=("sizes", "first", "tokens", *(() if is_cut else ("w", "f"))),
        following={} if is_grad or not columns else of_columns,
    )


def _rule_of_all_rows(
    operands: Sequence[Shaped], is_grad: bool, is_cut: bool, mode: str, pieces: int
) -> PartitionRule:
    """Rows and columns of a token stay on its device."""
    rows, columns = modes.split(mode)
    w = "f" if is_cut else "w"
    features = w if is_grad else "f"
    blocks = {"t": SCALE_BLOCK} if columns else {}
    if is_cut:
        blocks["f"] = operands[0].shape[1] // pieces
    is_padded = columns is not None and operands[0].shape[0] % SCALE_BLOCK != 0
    return PartitionRule(
        (f"t {w}", *["t f"] * is_grad),
        (f"t {features}",) * (2 if rows else 0) + (f"{features} t",) * (2 if columns else 0),
        blocks,
        uncut=(*(() if is_cut else ("w", "f")), *["t"] * is_padded),
    )


def run_shard(run, *operands, shards: Shards, mode: str, pieces: int, **params):
    """Computes columns from all tokens: devices exchange tokens for features of gate, up and dh."""
    of_rows, of_columns = modes.split(mode)
    of_features = shards.axes.get("f", ())
    pieces //= math.prod(shards.mesh_shape[axis] for axis in of_features)
    if of_columns is None or shards.count("t") == 1 or len(operands) < 3:
        return run(*operands, mode=mode, pieces=pieces, **params)
    gate_up, *dh, group_sizes, first_row = operands
    rows = run(*operands, mode=of_rows, pieces=pieces, **params) if of_rows else []
    halves = without_pieces(gate_up, pieces, 1)
    halves = halves.reshape(gate_up.shape[0], 2, gate_up.shape[1] // 2)
    axes = shards.axes["t"] if dh else shards.axes["c"][len(of_features) :]
    axes = axes if halves.shape[2] % shards.count("t") == 0 else ()
    halves = shards.move(halves, "t", 2, axes)
    gate_up = halves.reshape(halves.shape[0], 2 * halves.shape[2])
    dh = [shards.move(x, "t", 1, axes) for x in dh]
    columns = run(gate_up, *dh, group_sizes, first_row, mode=of_columns, pieces=1, **params)
    if dh and axes:  # dgate and dup of a feature are no neighbours in the result, so gather both
        halves = [x.reshape(2, x.shape[0] // 2, x.shape[1]) for x in columns]
        halves = [lax.all_gather(x, axes, axis=1, tiled=True) for x in halves]
        columns = [x.reshape(-1, x.shape[2]) for x in halves]
    if dh:
        columns = [in_pieces(x, pieces, 0) for x in columns]
    return [*rows, *columns]
