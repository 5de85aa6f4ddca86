"""The products of an expert's MLP, forward and backward, for rows that are quantised already.

The formulas are those for the rows of group i, the tokens of expert i, of x (m, d) and of the
cotangent dout (m, d), with w_gate_up (g, d, 2 f) and w_down (g, f, d). Brackets hold the scale
blocks of each operand along the contraction. The right column names the kernel.

    gate_up       = x   [1x128 along d]    . w_gate_up[i] [128x128]              1d2d
    h             = act(gate) * up                                               swiglu_quantize.py
    (both at once, in a forward pass alone)                                 grouped_gated_gemm.py
    out           = h   [1x128 along f]    . w_down[i]    [128x128]              1d2d

    dh            = dout [1x128 along d]   . w_down[i]^T  [128x128]              1d2d
    da            = [dgate, dup], from gate_up and dh                            swiglu_quantize.py
    dx            = da  [1x128 along 2 f]  . w_gate_up[i]^T [128x128]            1d2d
    dw_down[i]    = h^T [1x128 along tokens] . dout [1x128 along tokens]         1d1d
    dw_gate_up[i] = x^T [1x128 along tokens] . da   [1x128 along tokens]         1d1d

With wgrad_lhs_block=(128, 128) in the recipe, h^T and x^T have 128x128 blocks, and the last two are
2d1d products. With biases, b_gate_up[i] is added to gate_up and b_down[i] to out (_biases.py).

dh and dx read the same quantised values of the weights as out and gate_up do. Of all activations
only gate_up, dh, out and dx are stored unquantised. Sums are accumulated in f32. With
kept_gate_up="fp8" gate_up is FP8 between the passes, and da reads that (_kept_gate_up.py).

gated_mlp has no groups, and weights (d, 2 f) and (f, d). Its products are dense, as those of
matmul, and on a mesh that cuts rows devices add their parts of the gradients of weights.

Rows of no group are zeros in the results of products, or hold anything: `unused_rows` of the specs
says which. Then they may hold NaN, and reach no column, no gradient of a weight and none of a bias.

Each product is one function here. `forward` and `backward` put them together for moe_mlp and for
the layer on one device; moe/_parallel/turn.py does so for the layer on many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.grouped_products import grouped_gemm_as, grouped_wgrad_as
from jax_fp8gemm._ops.product import gemm_as, product_of_rows
from jax_fp8gemm._ops.product_spec import DType, ProductSpec, name_residual, quantize_args
from jax_fp8gemm._ops.weights import kept_and_transposed, transposed
from jax_fp8gemm._primitives.gated import gated_grad, in_pieces, without_pieces
from jax_fp8gemm._primitives.grouped_gated_gemm import grouped_gated_gemm, is_faster
from jax_fp8gemm._primitives.grouped_gemm import UnusedRows
from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize, swiglu_quantize
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes
from jax_fp8gemm.moe._biases import Biases, add_bias, as_biases, sum_of_groups
from jax_fp8gemm.moe._kept_gate_up import KeptGateUp, keep, name_columns, read
from jax_fp8gemm.moe._mlp_specs import Specs
from jax_fp8gemm.moe._operands import Weights


class Experts(NamedTuple):
    """The quantised weights of all experts, which the forward pass takes transposed; the biases."""

    gate_up: ScaledArray
    down: ScaledArray
    biases: Biases | None


class Columns(NamedTuple):
    """The operands of the weight gradients, quantised along the tokens of each group.

    Each is None where the gradient that reads it is not wanted: x that of w_gate_up, dout that of
    w_down.
    """

    x: ScaledArray | None
    dout: ScaledArray | None


class Residuals(NamedTuple):
    """What `forward` keeps for `backward`."""

    h_columns: ScaledArray | None
    gate_up: KeptGateUp


def transposed_weights(
    specs: Specs, w_gate_up: Weights, w_down: Weights, biases: Biases | None
) -> Experts:
    """Returns the transposed weights, which a forward pass without a gradient reads."""
    return Experts(transposed(specs.into, w_gate_up), transposed(specs.down, w_down), biases)


def weights_both_ways(
    specs: Specs, w_gate_up: Weights, w_down: Weights, biases: Biases | None
) -> tuple[Experts, Experts]:
    """Returns the weights for the backward pass, and transposed for the forward pass."""
    pairs = kept_and_transposed(specs.into, w_gate_up), kept_and_transposed(specs.down, w_down)
    kept, transposed = zip(*pairs, strict=True)
    return Experts(*kept, name_residual("rhs", biases)), Experts(*transposed, biases)


def _row_product(
    spec: ProductSpec,
    dtype: DType,
    rows: ScaledArray,
    w: ScaledArray,
    groups: Groups | None,
    out_spec: PartitionSpec | None = None,
    unused_rows: UnusedRows = "zero",
) -> jax.Array:
    """Multiplies each group of rows by its weight, or all rows by the one that there is."""
    if groups is None:
        return gemm_as(spec, dtype, rows, w, out_spec)
    return grouped_gemm_as(spec, dtype, rows, w, *groups, out_spec, unused_rows)


def gate_up_product(
    specs: Specs, rows: ScaledArray, w: Experts, groups: Groups | None
) -> jax.Array:
    """Returns gate_up (m, 2 f) of the quantised rows, by transposed weights."""
    into, left = specs.into, specs.unused_rows
    gate_up = _row_product(into, into.out_dtype, rows, w.gate_up, groups, unused_rows=left)
    if w.biases is None:
        return gate_up
    assert groups is not None  # gated_mlp has no biases
    return add_bias(gate_up, w.biases.gate_up, groups)


def down_product(specs: Specs, h: ScaledArray, w: Experts, groups: Groups | None) -> jax.Array:
    """Returns out (m, d) of the quantised rows of h, by transposed weights."""
    down = specs.down
    of_out = down.shardings.out, specs.unused_rows
    out = _row_product(down, down.out_dtype, h, w.down, groups, *of_out)
    if w.biases is None:
        return out
    assert groups is not None  # gated_mlp has no biases
    return add_bias(out, w.biases.down, groups)


def hidden(
    specs: Specs, gate_up: jax.Array, groups: Groups | None, *, with_columns: bool
) -> tuple[ScaledArray, ScaledArray | None]:
    """Returns h (m, f), quantised along its rows, and if with_columns along its columns too."""
    down = specs.down
    args = quantize_args(down, down.recipe.fwd)
    activation, pieces = specs.activation, specs.pieces
    how: dict[str, Any] = dict(with_columns=with_columns, column_block=down.recipe.wgrad_lhs_block)
    return swiglu_quantize(
        gate_up, *(groups or ()), activation=activation, pieces=pieces, **how, **args
    )


def hidden_of_rows(
    specs: Specs, rows: ScaledArray, w: Experts, groups: Groups | None
) -> ScaledArray:
    """Returns h (m, f) of the quantised rows, by transposed weights, where nobody reads gate_up.

    Large groups have one kernel for it, which does not store gate_up. The bits are the same.
    """
    into, down = specs.into, specs.down
    is_plain = w.biases is None and specs.pieces == 1 and into.out_dtype == jnp.bfloat16
    if groups is not None and is_plain:
        (g, n, k), m = w.gate_up.shape, rows.shape[0]
        if is_faster(m, k, n // 2, g):
            args = quantize_args(down, down.recipe.fwd)
            how: dict[str, Any] = dict(activation=specs.activation, reduce_dtype=into.reduce_dtype)
            return grouped_gated_gemm(rows, w.gate_up, *groups, **how, **args)
    gate_up = gate_up_product(specs, rows, w, groups)
    return hidden(specs, gate_up, groups, with_columns=False)[0]


def hidden_gradient(
    specs: Specs, douts: ScaledArray, w: Experts, groups: Groups | None
) -> jax.Array:
    """Returns dh (m, f) of the quantised rows of dout."""
    with jax.named_scope("dlhs"):
        down, left = specs.down, specs.unused_rows
        return _row_product(down, down.lhs_dtype, douts, w.down, groups, unused_rows=left)


def row_gradient(
    specs: Specs, gate_up: jax.Array, dh: jax.Array, w: Experts, groups: Groups | None
) -> tuple[jax.Array, ScaledArray | None]:
    """Returns dx (m, d), and the columns of da if w_gate_up has a gradient."""
    into = specs.into
    args = quantize_args(into, into.recipe.bwd)
    how: dict[str, Any] = dict(activation=specs.activation, pieces=specs.pieces)
    with_columns = into.rhs_dtype is not None
    da, da_columns = swiglu_grad_quantize(
        gate_up, dh, *(groups or ()), with_columns=with_columns, **how, **args
    )
    with jax.named_scope("dlhs"):
        of_dx = into.shardings.lhs, specs.unused_rows
        dx = _row_product(into, into.lhs_dtype, da, w.gate_up, groups, *of_dx)
    return dx, da_columns


def weight_gradient(
    spec: ProductSpec,
    lhs: ScaledArray | None,
    dout: ScaledArray | None,
    groups: Groups | None,
    accum: jax.Array | None = None,
) -> jax.Array | None:
    """Returns the gradient of the weights of this product; None if they have none.

    accum: an f32 array that it is added to in place, or None.
    """
    if spec.rhs_dtype is None:
        return None
    with jax.named_scope("drhs"):
        if groups is None:
            assert lhs is not None and dout is not None and accum is None
            return gemm_as(spec, spec.rhs_dtype, lhs, dout, spec.shardings.rhs)
        how = groups.sizes, spec.shardings.rhs, accum
        return grouped_wgrad_as(spec, spec.rhs_dtype, lhs, dout, *how)


def bias_gradients(
    specs: Specs, gate_up: jax.Array, dh: jax.Array, dout: jax.Array, groups: Groups
) -> Biases:
    """Returns the f32 gradients of the biases, from the rows of dout (m, d)."""

    def run(gate_up: jax.Array, dh: jax.Array, dout: jax.Array, groups: Groups):
        halves = without_pieces(gate_up, specs.pieces, 1)
        da = in_pieces(gated_grad(halves, dh, specs.activation), specs.pieces, 1)
        return sum_of_groups(da, groups), sum_of_groups(dout, groups)

    whole = lambda: (PartitionSpec(), PartitionSpec())
    return Biases(*with_auto_axes(run, (gate_up, dh, dout, groups), whole))


def forward_alone(specs: Specs, rows: ScaledArray, w: Experts, groups: Groups | None) -> jax.Array:
    """Returns the experts' results for a caller that takes no gradient of them."""
    return down_product(specs, hidden_of_rows(specs, rows, w, groups), w, groups)


def dense_forward_alone(
    specs: Specs, x: jax.Array, w_gate_up: Weights, w_down: Weights
) -> jax.Array:
    """Returns the result of gated_mlp of x (m, d) for a caller that takes no gradient of it.

    The first product quantises few rows itself.
    """
    gate_up = product_of_rows(specs.into, x, w_gate_up, None)
    h, _ = hidden(specs, gate_up, None, with_columns=False)
    down = specs.down
    return gemm_as(down, down.out_dtype, h, transposed(down, w_down), down.shardings.out)


def forward(
    specs: Specs, rows: ScaledArray, w: Experts, groups: Groups | None
) -> tuple[jax.Array, Residuals]:
    """Returns the experts' results, and what `backward` needs.

    Under jit, a residual that no cotangent needs is not computed.
    """
    gate_up = gate_up_product(specs, rows, w, groups)
    kept = name_residual("out", keep(specs.into, gate_up))
    gate_up = gate_up if isinstance(kept, ScaledArray) else kept
    with_columns = specs.down.rhs_dtype is not None
    h, h_columns = hidden(specs, gate_up, groups, with_columns=with_columns)
    out = down_product(specs, h, w, groups)
    return name_residual("out", out), Residuals(name_columns(kept, h_columns), kept)


def backward(
    specs: Specs,
    residuals: Residuals,
    w: Experts,
    douts: ScaledArray,
    columns: Columns,
    groups: Groups | None,
    dout: Callable[[], jax.Array],
) -> tuple[jax.Array, Any, Any, Biases | None]:
    """Returns dx, dw_gate_up, dw_down and dbiases, from quantised rows of dout and the columns.

    dout() returns the rows unquantised, from which the gradients of biases are computed.
    """
    h_columns, kept = residuals
    gate_up, dh = read(specs.into, kept, hidden_gradient(specs, douts, w, groups))
    dx, da_columns = row_gradient(specs, gate_up, dh, w, groups)
    dw_gate_up = weight_gradient(specs.into, columns.x, da_columns, groups)
    dw_down = weight_gradient(specs.down, h_columns, columns.dout, groups)
    dw_gate_up, dw_down = specs.gradients_of_weights(dw_gate_up, dw_down)
    if w.biases is None:
        return dx, dw_gate_up, dw_down, None
    assert groups is not None  # gated_mlp has no biases
    dbiases = bias_gradients(specs, gate_up, dh, dout(), groups)
    return dx, dw_gate_up, dw_down, as_biases(dbiases, w.biases)
