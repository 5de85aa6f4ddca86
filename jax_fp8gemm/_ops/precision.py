"""xla_precision_of: which precision an XLA dot gets where a caller asks for more than FP8."""

from __future__ import annotations

from typing import Any, TypeAlias

from jax import lax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.recipe import NAMED, Recipe

# What lax.dot_general takes: a precision for each operand, or an algorithm.
XlaPrecision: TypeAlias = tuple[lax.Precision, lax.Precision] | lax.DotAlgorithmPreset
# The names of jax.lax.DotAlgorithmPreset for the dtypes that the ops take.
_ALGORITHMS = (
    "DEFAULT",
    *("BF16_BF16_BF16", "BF16_BF16_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6"),
    *("BF16_BF16_F32_X9", "F16_F16_F16", "F16_F16_F32", "TF32_TF32_F32", "TF32_TF32_F32_X3"),
    "F32_F32_F32",
)


def xla_precision_of(op: str, precision: Any) -> XlaPrecision | None:
    """Returns None where `precision` means FP8, else the precision of an XLA dot."""
    if isinstance(precision, str) and precision in _ALGORITHMS:
        precision = lax.DotAlgorithmPreset[precision]
    if isinstance(precision, lax.DotAlgorithmPreset) and precision.name in _ALGORITHMS:
        return None if precision == lax.DotAlgorithmPreset.DEFAULT else precision
    pair = tuple(precision) if isinstance(precision, tuple | list) else (precision, precision)
    try:
        pair = tuple(lax.Precision.DEFAULT if p is None else lax.Precision(p) for p in pair)
    except (ValueError, KeyError, TypeError):
        pair = ()
    if len(pair) != 2:
        is_recipe = isinstance(precision, Recipe) or precision in list(NAMED)
        hint = ". A recipe goes by its name: recipe=..." if is_recipe else ""
        raise ValueError(
            f"{op}: precision must be None, DEFAULT, HIGH or HIGHEST, a pair of them, or a "
            "DotAlgorithmPreset of bf16, f16, tf32 or f32; "
            f"got {checks.short_repr(precision)}{hint}"
        )
    return pair if any(p != lax.Precision.DEFAULT for p in pair) else None
