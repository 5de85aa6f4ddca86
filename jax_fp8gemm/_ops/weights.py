"""Weights, the rhs of a product: an array, or a ScaledArray quantised once for many products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.recipe import Format
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array, values_and_scale
from jax_fp8gemm._ops.product_spec import ProductSpec, Weights, quantize_args
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.reverse_mode import undifferentiable
from jax_fp8gemm._primitives.quantize import quantize_transposed


def check_weights(op: str, name: str, w: Any) -> None:
    """Raises unless `w` is an array of floats, or a ScaledArray with block (128, 128)."""
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


def without_gradient(op: str, name: str, w: Weights) -> Weights:
    """Returns `w`. A ScaledArray then raises TypeError where it is differentiated."""
    if not isinstance(w, ScaledArray):
        return w
    message = (
        f"{op}: a ScaledArray {name} has no gradient; got one among the differentiated arguments. "
        f"Differentiate with respect to the unquantised {name}, or apply jax.lax.stop_gradient."
    )
    return jax.tree.map(lambda leaf: undifferentiable(jnp.asarray(leaf), message), w)


def transposed(spec: ProductSpec, w: Weights) -> ScaledArray:
    """Returns the quantised transpose of `w`, the operand of a product without a gradient."""
    if isinstance(w, ScaledArray):
        return _with_values(w.T)
    return quantize_transposed(w, **quantize_args(spec, spec.recipe.fwd))


def both_ways(spec: ProductSpec, fmt: Format | None, w: Weights) -> tuple[ScaledArray, ScaledArray]:
    """Returns `w` and its transpose, quantised.

    An array is quantised in the format `fmt`, and read once for both. The first result may hold
    transposed values only, those of the second: a backward pass that reads it transposes them.
    """
    if not isinstance(w, ScaledArray):
        args = quantize_args(spec, fmt)
        w = quantize(w, block=spec.recipe.rhs_block, with_transpose=True, **args)
    kept = None if w.values is not None else w.transposed
    return ScaledArray(w.values, w.scale, kept, w.block), _with_values(w.T)


def _with_values(w: ScaledArray) -> ScaledArray:
    """Returns `w` with its values stored, so that no product has to transpose them."""
    return ScaledArray(*values_and_scale(w), None, w.block)
