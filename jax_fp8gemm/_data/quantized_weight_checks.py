"""Checks of QuantizedWeights: what an op can know of the quantisation when it is traced."""

from __future__ import annotations

import math
from typing import cast

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DTYPES, Recipe
from jax_fp8gemm._data.scaled_array import check_scaled_array


def check_quantized_weight(op: str, name: str, w: QuantizedWeight) -> None:
    """Raises with a sentence if `w` breaks the invariants of a QuantizedWeight."""
    weight = checks.check_array(op, f"{name}.weight", w.weight)
    checks.check_dtype(op, f"{name}.weight", weight, formats.FLOAT_DTYPES)
    _check_static(op, name, w.recipe, w.contracting)
    if w.scaled is None:
        return
    check_scaled_array(op, f"{name}.scaled", w.scaled)
    has_dims = all(-w.ndim <= d for d in w.contracting) and w.scaled.ndim - 2 <= w.ndim
    expected = folded_shape(w) if has_dims else ()
    if w.scaled.block != (128, 128) or w.scaled.shape != expected:
        raise ValueError(
            f"{op}: {name}.scaled must be the quantisation of {name}.weight with block (128, 128), "
            f"{list(expected)}; got {name}.weight {checks.short_type(weight)}, {name}.scaled "
            f"{checks.short_type(w.scaled)} with block {w.scaled.block}. Quantise again with "
            f"quantize_weight({name}.weight)."
        )


def _check_static(op: str, name: str, recipe: object, contracting: object) -> None:
    dims = cast(tuple[object, ...], contracting) if isinstance(contracting, tuple) else ()
    is_from_end = all(isinstance(d, int) and d < 0 for d in dims)
    if not isinstance(recipe, Recipe) or not dims or not is_from_end:
        raise TypeError(
            f"{op}: {name}.recipe must be a Recipe, and {name}.contracting a tuple of dimensions "
            f"below 0; got {checks.short_repr(recipe)}, {contracting!r}. Make "
            f"{name} with quantize_weight."
        )


def folded_shape(w: QuantizedWeight) -> tuple[int, ...]:
    """Returns the shape (..., k, n) of the matrix that `w` stands for."""
    num_batch = w.ndim - len(w.contracting) - len(w.free)
    k, n = (math.prod(w.shape[d] for d in dims) for dims in (w.contracting, w.free))
    return (*w.shape[:num_batch], k, n)


def check_quantised_by(op: str, w: QuantizedWeight, recipe: Recipe) -> None:
    """Raises ValueError unless `w` is quantised as products of `recipe` quantise a weight."""
    if not recipe.is_fp8:
        return
    fields = ("fwd", "rhs_block", "pow2_scale")
    is_alike = all(getattr(w.recipe, name) == getattr(recipe, name) for name in fields)
    has_format = w.scaled is not None and w.scaled.dtype == DTYPES[recipe.fwd or "e4m3"]
    if not is_alike or not has_format:
        stored = "nothing" if w.scaled is None else checks.short_type(w.scaled)
        raise ValueError(
            f"{op}: a QuantizedWeight must be quantised as the recipe says, {recipe!r}; got one "
            f"that holds {stored}, by {w.recipe!r}. Quantise with quantize_weight(w, recipe=...), "
            "or pass its weight."
        )
