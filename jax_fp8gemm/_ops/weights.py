"""Weights, the rhs of a product: an array, or one that was quantised once for many products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.quantized_weight_checks import check_quantized_weight
from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import (
    ScaledArray,
    check_scaled_array,
    check_unquantised,
    without_twin,
)
from jax_fp8gemm._ops.product_spec import ProductSpec, Weights, quantize_args
from jax_fp8gemm._ops.reverse_mode import refusing
from jax_fp8gemm._primitives.quantize import quantize_in_mode, quantize_transposed
from jax_fp8gemm._sharding.explicit_axes import fold


def check_weights(op: str, name: str, w: Any) -> None:
    """Raises unless `w` is floats (..., k, n), or a ScaledArray or a QuantizedWeight of such."""
    if isinstance(w, QuantizedWeight):
        check_quantized_weight(op, name, w)
        if w.scaled is not None and (w.contracting, w.free) != ((-2,), (-1,)):
            raise _wrongly_folded(op, name, w, f"Quantise with quantize_weight({name}).")
        return
    if not isinstance(w, ScaledArray):
        checks.check_array(op, name, w, hint="Or pass a ScaledArray.")
        hint = "Quantised weights go in as a ScaledArray."
        checks.check_dtype(op, name, w, formats.FLOAT_DTYPES, hint=hint)
        return
    check_scaled_array(op, name, w)
    if w.block != (128, 128):
        raise ValueError(
            f"{op}: {name}.block must be (128, 128), whose transpose is exact; got {w.block}. "
            f"Quantise with quantize({name}, block=(128, 128))."
        )


def check_weight(op: str, name: str, w: Any) -> None:
    """Raises unless `w` is an array of floats or a QuantizedWeight, of any dimensions."""
    if isinstance(w, QuantizedWeight):
        check_quantized_weight(op, name, w)
    else:
        check_unquantised(op, name, w)


def check_folded(
    op: str, name: str, w: QuantizedWeight, contracting: Sequence[int], batch: Sequence[int]
) -> None:
    """Raises unless `w` is quantised for products that contract these dimensions.

    One that is quantised for the contraction of its free dimensions will do too.
    """
    if w.scaled is None:
        return
    dims, free = _folded_dims(w, contracting, batch)
    has_dims = (w.contracting, w.free) in ((dims, free), (free, dims))
    if not has_dims or list(batch) != list(range(w.scaled.ndim - 2)):
        raise _wrongly_folded(op, name, w, _how_to_fold(name, w, contracting, batch))


def _folded_dims(
    w: QuantizedWeight, contracting: Sequence[int], batch: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the contracting and the free dimensions of a product, counted from the end."""
    dims = tuple(d - w.ndim for d in contracting)
    free = tuple(d for d in range(-w.ndim, 0) if d not in dims and d + w.ndim not in batch)
    return dims, free


def _wrongly_folded(op: str, name: str, w: QuantizedWeight, hint: str) -> ValueError:
    return ValueError(
        f"{op}: {name} must be quantised as the matrices that the product reads; got "
        f"{checks.short_type(w)} with contracting={w.contracting}. {hint}"
    )


def _how_to_fold(
    name: str, w: QuantizedWeight, contracting: Sequence[int], batch: Sequence[int]
) -> str:
    """Says how quantize_weight makes the matrices of a product that contracts these dimensions."""
    num_batch, num_free = len(batch), w.ndim - len(contracting) - len(batch)
    if not contracting or not num_free or list(batch) != list(range(num_batch)):
        return "No quantisation fits this product: pass its weight."
    if num_batch and w.ndim == num_batch + 2:
        return f"Quantise with quantize_weight({name})."
    dims = [d - num_batch for d in contracting]  # quantize_weight is mapped over the batch
    wanted = f"contracting={dims[0] if len(dims) == 1 else tuple(dims)}"
    if num_batch:
        return f"Map quantize_weight with {wanted} over the leading dimensions by jax.vmap."
    return f"Quantise with quantize_weight({name}, {wanted})."


def as_matrices(
    op: str, name: str, w: QuantizedWeight, contracting: Sequence[int], batch: Sequence[int]
) -> QuantizedWeight:
    """Returns `w` as matrices (*batch, k, n), for a product that contracts these dimensions.

    A weight that was quantised for the contraction of its other dimensions is transposed exactly.
    """
    check_folded(op, name, w, contracting, batch)
    if w.scaled is None:
        return w
    dims, free = _folded_dims(w, contracting, batch)
    is_turned = (w.free, w.contracting) == (dims, free)
    weight = fold(w.weight, *([d] for d in batch), dims, free)
    scaled = w.scaled.T if is_turned else w.scaled
    return replace(w, weight=weight, scaled=scaled, contracting=(-2,))


def unquantised(w: jax.Array | QuantizedWeight) -> jax.Array:
    """Returns the weight, which a product without FP8 reads."""
    return w.weight if isinstance(w, QuantizedWeight) else w


def refusing_gradients(op: str, weights: Mapping[str, Weights], x: jax.Array) -> jax.Array:
    """Returns `x`. A ScaledArray among the weights, by name, raises TypeError if differentiated."""
    for name, w in weights.items():
        if isinstance(w, ScaledArray):
            message = (
                f"{op}: a ScaledArray {name} has no gradient; got one among the differentiated "
                f"arguments. Differentiate with respect to the unquantised {name}, or apply "
                "jax.lax.stop_gradient."
            )
            x = refusing(x, w, message)
    return x


def transposed(spec: ProductSpec, w: Weights) -> ScaledArray:
    """Returns the quantised transpose of `w`, the operand of a product without a gradient."""
    if not isinstance(w, jax.Array):
        return without_twin(_quantised(w).T)
    return quantize_transposed(w, _is_padded(w), **quantize_args(spec, spec.recipe.fwd))


def both_ways(spec: ProductSpec, fmt: Format | None, w: Weights) -> tuple[ScaledArray, ScaledArray]:
    """Returns `w` and its transpose, quantised.

    An array is quantised in the format `fmt`, and read once for both. The first result may hold
    transposed values only, those of the second: a backward pass that reads it transposes them.
    """
    if isinstance(w, jax.Array):
        (w,) = quantize_in_mode(w, "block_both", _is_padded(w), **quantize_args(spec, fmt))
    w = _quantised(w)
    kept = None if w.values is not None else w.transposed
    return ScaledArray(w.values, w.scale, kept, w.block), without_twin(w.T)


def kept_and_transposed(spec: ProductSpec, w: Weights) -> tuple[ScaledArray, ScaledArray]:
    """Returns `w` as the backward pass keeps it, and its transpose for the forward pass; quantised.

    The transpose holds what is kept as its own transpose. So a mesh that gathers `w` for both
    passes gathers what is kept, once. Where rows are padded, it is not the transpose of what is
    kept, and holds none.

    NOTE: the forward pass must not read FP8 values under their name. Where jax.checkpoint saves a
    named value that is read before too, JAX rounds it by reduce_precision, which takes e4m3fn for a
    format with infinities and makes NaN of all above 240.
    """
    kept, turned = both_ways(spec, spec.recipe.fwd, w)
    twin = kept.values if kept.mT.shape == turned.shape else None
    return spec.kept_rhs(kept), replace(turned, transposed=twin)


def _is_padded(w: jax.Array) -> bool:
    """Whether `w` is quantised with rows of whole scale blocks: a matrix, but no stack of them.

    Dense products read such rows, and grouped products do not.
    """
    return w.ndim == 2


def _quantised(w: QuantizedWeight | ScaledArray) -> ScaledArray:
    scaled = w.scaled if isinstance(w, QuantizedWeight) else w
    assert scaled is not None  # check_quantised_by
    return scaled
