"""What is measured of a quantised operand, as a row of f32 numbers.

FIELDS names the numbers of a row. Those of several runs, of a scan or of several devices, merge
into one row of the same fields. Sums of squares are divided by amax^2, for f32 could not hold them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_fp8gemm._data.dequantize import spread_scale
from jax_fp8gemm._data.groups import group_of_rows
from jax_fp8gemm._inspect import site
from jax_fp8gemm._inspect.walk import Found, Measure
from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.gated import gated, gated_grad
from jax_fp8gemm._primitives.gather_quantize import gathered
from jax_fp8gemm._primitives.quantize_ragged import tokens_of_columns
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes

FIELDS = ("amax", "nonzero", "flushed", "saturated", "nonfinite",
          "scale_min", "scale_max", "error", "norm")  # fmt: skip
_IDENTITY = (0.0, 0.0, 0.0, 0.0, 0.0, float("inf"), 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Key:
    """What is measured: one quantisation of one equation."""

    path: str
    op: str
    operand: str
    pass_: str
    along: str
    shape: tuple[int, ...]
    dtype: str

    def record(self, row: np.ndarray) -> dict[str, Any]:
        """Returns this key and what its row says, for people to read."""
        found = dict(zip(FIELDS, map(float, row), strict=True))
        share = lambda name: found[name] / found["nonzero"] if found["nonzero"] else 0.0
        error = math.sqrt(found["error"] / found["norm"]) if found["norm"] else 0.0
        return {
            "path": self.path,
            "op": self.op,
            "operand": self.operand,
            "pass": self.pass_,
            "blocks": self.along,
            "shape": "x".join(map(str, self.shape)),
            "dtype": self.dtype,
            "amax": found["amax"],
            "flushed": share("flushed"),
            "saturated": share("saturated"),
            "scale_min": found["scale_min"],
            "scale_max": found["scale_max"],
            "error": error,
            "nonfinite": int(found["nonfinite"]),
        }


def of_eqn(eqn: Any, stack: str, operands: list[Any], results: list[Any]) -> Found:
    """Measures the quantisations of an equation: one, or two in modes of rows and columns."""
    path, op = site.path_and_op(stack, eqn)
    where = path, op, site.operand_of(stack, eqn), site.pass_of(stack)
    keys: list[Key] = []

    def rows(*arrays: Any) -> jax.Array:
        found, keys[:] = [], []
        split = list(arrays[: len(operands)]), list(arrays[len(operands) :])
        for along, x, values, scale in _quantisations(eqn, *split):
            values = values[..., : x.shape[-1]]  # without those that pad a row
            keys.append(Key(*where, along, x.shape, values.dtype.name))
            found.append(_row(x, values, scale, (128, 128) if along == "block" else (1, 128)))
        return jnp.stack(found)

    found = with_auto_axes(rows, [*operands, *results], lambda: PartitionSpec(None, None))
    return keys, found


def _quantisations(eqn: Any, operands: list[Any], results: list[Any]):
    """Yields (how the blocks lie, unquantised values, FP8 values, scales), in f32."""
    name, params = eqn.primitive.name.removeprefix(site.PREFIX), eqn.params
    x, mode = operands[0], params["mode"]
    if name == "quantize" and mode in modes.SQUARE:
        y = x.mT if mode == "block_transposed" else x
        yield "block", y.astype(jnp.float32), results[0], results[-1]
        return
    if name == "gather_quantize":
        y = gathered(*operands, is_weighted=params["is_weighted"])
    elif name == "swiglu_quantize":
        y = gated(x, params["activation"])
    elif name == "swiglu_grad_quantize":
        y = gated_grad(x, operands[1], params["activation"])
    elif name == "weighted_swiglu_grad_quantize":
        dh, weights = operands[1:3]
        dh = (dh.astype(jnp.float32) * weights[:, None]).astype(dh.dtype)
        y = gated_grad(x, dh, params["activation"])
        *results, _ = results  # without the dots
    else:
        y = x.astype(jnp.float32)
    has_rows, has_columns = modes.split(mode)
    is_swiglu = "swiglu" in name
    has_groups = name != "quantize" and not (is_swiglu and len(operands) < 3)
    if has_rows and is_swiglu and has_groups:
        yield "row", *_rows_of_groups(y, *results[:2], *operands[-2:])
    elif has_rows:
        yield "row", y, results[0], results[1]
    if has_columns:
        columns = jnp.moveaxis(y, -1, 0)
        if has_groups:
            columns = tokens_of_columns(y, *operands[-2:]).T
        if not modes.has_square_columns(mode):
            yield "column", columns, results[-2], results[-1]
        else:  # as matrices: the dimensions between k and m are no part of a block
            yield "block", *(jnp.moveaxis(z, 0, -2) for z in (columns, *results[-2:]))


def _rows_of_groups(
    x: jax.Array, values: jax.Array, scale: jax.Array, sizes: jax.Array, first_row: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns quantised rows. Those of no group, which may hold anything, do not count."""
    is_used = (group_of_rows(sizes, first_row, x.shape[0]) < sizes.size)[:, None]
    fillers = jnp.zeros((), x.dtype), jnp.zeros((), values.dtype), jnp.array(jnp.nan, scale.dtype)
    arrays = zip((x, values, scale), fillers, strict=True)
    return tuple(jnp.where(is_used, array, filler) for array, filler in arrays)


def _row(x: jax.Array, values: jax.Array, scale: jax.Array, block: tuple[int, int]) -> jax.Array:
    if x.size == 0:
        return jnp.array(_IDENTITY, jnp.float32)
    info: Any = jnp.finfo(values.dtype)
    fmax = float(info.max)
    half_step = 2.0 ** (math.floor(math.log2(fmax)) - info.nmant - 1)
    quantised = values.astype(jnp.float32)
    spread = spread_scale(scale, x.shape, block)
    count = lambda mask: jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    is_good = jnp.isfinite(x) & jnp.isfinite(spread)
    magnitude = jnp.where(is_good, jnp.abs(x), 0)
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
    unit = jnp.where(amax > 0, amax, 1)
    error = jnp.where(is_good, (quantised * spread - x) / unit, 0)
    scales = jnp.isfinite(scale)
    return jnp.stack(
        [
            amax,
            count(magnitude > 0),
            count((magnitude > 0) & (quantised == 0)),
            count(magnitude > spread * (fmax + half_step)),
            count(~jnp.isfinite(x)),
            jnp.min(jnp.where(scales, scale, jnp.inf)),
            jnp.max(jnp.where(scales, scale, 0)),
            jnp.sum(error**2),
            jnp.sum((magnitude / unit) ** 2),
        ]
    )


def _merge(rows: jax.Array) -> jax.Array:
    """Merges rows (several, keys, fields) to (keys, fields)."""
    each = {name: rows[..., i] for i, name in enumerate(FIELDS)}
    amax = jnp.max(each["amax"], axis=0)
    weight = (each["amax"] / jnp.where(amax > 0, amax, 1)[None]) ** 2
    merged = {name: jnp.sum(each[name], axis=0) for name in FIELDS[1:5]}
    merged |= {name: jnp.sum(each[name] * weight, axis=0) for name in FIELDS[7:]}
    merged |= dict(
        amax=amax,
        scale_min=jnp.min(each["scale_min"], axis=0),
        scale_max=jnp.max(each["scale_max"], axis=0),
    )
    return jnp.stack([merged[name] for name in FIELDS], axis=-1)


def quantisations() -> Measure:
    """Returns how a walk measures quantised operands."""
    return Measure(of_eqn, _merge, jnp.array(_IDENTITY, jnp.float32))
