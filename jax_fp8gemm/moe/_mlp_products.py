"""The products of moe_mlp, forward and backward, for rows that are quantised already.

For the rows of group i, its tokens, of x (m, d) and of the cotangent dout (m, d), with w_gate_up
(g, d, 2 f) and w_down (g, f, d), in brackets the scale blocks of each operand along the
contraction:

    gate_up       = x   [1x128 along d]    . w_gate_up[i] [128x128]              1d2d
    h             = silu(gate) * up                                              swiglu_quantize.py
    out           = h   [1x128 along f]    . w_down[i]    [128x128]              1d2d

    dh            = dout [1x128 along d]   . w_down[i]^T  [128x128]              1d2d, out's values
    da            = [dgate, dup], from gate_up and dh                            swiglu_quantize.py
    dx            = da  [1x128 along 2 f]  . w_gate_up[i]^T [128x128]            1d2d, gate_up's
    dw_down[i]    = h^T [1x128 along tokens] . dout [1x128 along tokens]         1d1d
    dw_gate_up[i] = x^T [1x128 along tokens] . da   [1x128 along tokens]         1d1d

Of all activations only gate_up, dh, out and dx are stored unquantised; accumulation is f32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.scaled_products import gemm_as, wgrad_as
from jax_fp8gemm._ops.weights import both_ways, transposed
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize, swiglu_quantize

Specs = tuple[ProductSpec, ProductSpec]  # of the products with w_gate_up and with w_down
Groups = tuple[jax.Array, jax.Array]  # group_sizes, and the row where the first group starts


class Experts(NamedTuple):
    """Quantised weights; the forward pass has their transposes."""

    gate_up: ScaledArray
    down: ScaledArray


def transposed_weights(specs: Specs, w_gate_up: Any, w_down: Any) -> Experts:
    into, down = specs
    return Experts(transposed(into, w_gate_up), transposed(down, w_down))


def weights_both_ways(specs: Specs, w_gate_up: Any, w_down: Any) -> tuple[Experts, Experts]:
    """The weights for the backward pass, and transposed for the forward pass."""
    into, down = specs
    fmt = into.recipe.fwd
    kept, transposed = map(Experts, both_ways(into, fmt, w_gate_up), both_ways(down, fmt, w_down))
    return name_residual("rhs", kept), transposed


def forward(
    specs: Specs, rows: ScaledArray, w: Experts, groups: Groups, *, is_differentiated: bool
) -> tuple[jax.Array, Any]:
    """The experts' results, and what `backward` needs; under jit, what no wanted cotangent reads
    is not computed."""
    into, down = specs
    args = quantize_args(into, into.recipe.fwd)
    gate_up = name_residual("out", gemm_as(into, into.out_dtype, rows, w.gate_up, *groups))
    with_columns = is_differentiated and down.rhs_dtype is not None
    h, h_columns = swiglu_quantize(gate_up, *groups, with_columns=with_columns, **args)
    out = gemm_as(down, down.out_dtype, h, w.down, *groups, down.shardings.out)
    out = name_residual("out", out)
    return out, (name_residual("lhs", h_columns), gate_up)


def backward(
    specs: Specs,
    residuals: Any,
    w: Experts,
    rows: ScaledArray,
    columns: tuple[Any, Any],
    groups: Groups,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dx, dw_gate_up and dw_down, from quantised rows of dout and ragged columns of x and dout."""
    h_columns, gate_up = residuals
    x_columns, dout_columns = columns
    into, down = specs
    args = quantize_args(into, into.recipe.bwd)
    with jax.named_scope("dlhs"):
        dh = gemm_as(down, down.lhs_dtype, rows, w.down, *groups)
    has_gradient = into.rhs_dtype is not None
    rows, da_columns = swiglu_grad_quantize(gate_up, dh, *groups, with_columns=has_gradient, **args)
    with jax.named_scope("dlhs"):
        dx = gemm_as(into, into.lhs_dtype, rows, w.gate_up, *groups, into.shardings.lhs)
    with jax.named_scope("drhs"):
        dw_gate_up = _wgrad(into, x_columns, da_columns, groups)
        dw_down = _wgrad(down, h_columns, dout_columns, groups)
    return dx, dw_gate_up, dw_down


def _wgrad(spec: ProductSpec, lhs: Any, dout: Any, groups: Groups) -> jax.Array | None:
    if spec.rhs_dtype is None:
        return None
    return wgrad_as(spec, spec.rhs_dtype, lhs, dout, groups[0], spec.shardings.rhs)
