"""Specs: what is static about the two products of an expert's MLP, and checks of its arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    check_precision,
    kernel_dtype,
    make_spec,
    with_shardings,
)
from jax_fp8gemm._ops.weights import check_weights
from jax_fp8gemm._primitives.grouped_gemm import UnusedRows
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh
from jax_fp8gemm.moe._operands import Weights


class Specs(NamedTuple):
    """The specs of the products with w_gate_up (`into`) and w_down (`down`), and the activation.

    Both have the same recipe and implementation. A spec whose rhs_dtype is None belongs to weights
    that are quantised already and have no gradient. pieces: how the columns of w_gate_up are laid
    out (_primitives/gated.py). unused_rows: what the rows of no group hold in the results of the
    products (_primitives/grouped_gemm.py).
    """

    into: ProductSpec
    down: ProductSpec
    activation: Activation
    pieces: int = 1
    unused_rows: UnusedRows = "zero"

    def gradients_of_weights(self, dw_gate_up: Any, dw_down: Any) -> tuple[Any, Any]:
        """Returns the arrays, or None, as the gradients of what the weights are."""
        return self.into.gradient_of_rhs(dw_gate_up), self.down.gradient_of_rhs(dw_down)


def check_experts(op: str, x: Any, w_gate_up: Any, w_down: Any) -> None:
    """Raises unless x holds rows (m, d) and the others are the weights of experts for them."""
    check_unquantised(op, "x", x)
    checks.check_ndim(op, "x", x, 2, "(m, d)", hint="Fold leading dimensions into m.")
    for name, w, layout in (
        ("w_gate_up", w_gate_up, "(g, d, 2 f)"),
        ("w_down", w_down, "(g, f, d)"),
    ):
        check_weights(op, name, w)
        checks.check_ndim(op, name, w, 3, layout)
    (_, d), (g, f, _) = x.shape, w_down.shape
    if g == 0:
        raise ValueError(f"{op}: w_down must hold an expert; got {checks.short_type(w_down)}")
    if w_gate_up.shape != (g, d, 2 * f) or w_down.shape != (g, f, d):
        raise ValueError(
            f"{op}: x (m, d), w_gate_up (g, d, 2 f) and w_down (g, f, d) must share g, d and f; "
            f"got x {checks.short_type(x)}, w_gate_up {checks.short_type(w_gate_up)}, "
            f"w_down {checks.short_type(w_down)}"
        )


def check_num_experts(op: str, num_experts: int, w_gate_up: Weights) -> None:
    """Raises ValueError if one device would hold more experts than the kernels take."""
    if num_experts > _groups.MAX_GROUPS:
        raise ValueError(
            f"{op}: a device must hold at most {_groups.MAX_GROUPS} experts; got {num_experts}, "
            f"w_gate_up {checks.short_type(w_gate_up)}"
        )


def make_specs(
    op: str,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
    recipe: Recipe,
    implementation: Implementation,
    activation: Activation,
    pieces: int = 1,
) -> Specs:
    """Returns the specs for rows x (m, d), and checks the recipe and the implementation."""
    weight = lambda w: None if isinstance(w, ScaledArray) else w
    kept = kernel_dtype(x.dtype)
    into = make_spec(op, x, weight(w_gate_up), recipe, kept, implementation)
    h = jax.ShapeDtypeStruct((x.shape[0], w_down.shape[-2]), kept)
    down = make_spec(op, h, weight(w_down), recipe, x.dtype, implementation)
    check_precision(op, None, into)
    if recipe.batch_invariant and not recipe.is_fused:
        raise NotImplementedError(
            f"{op}: batch_invariant must go with an FP8 fwd and wgrad='fp8'; got {recipe}"
        )
    return Specs(into, down, activation, pieces)


def with_operand_shardings(
    specs: Specs, x: jax.Array, w_gate_up: Weights, w_down: Weights
) -> Specs:
    """Returns `specs` for operands on a mesh with Explicit axes; the result is sharded as x."""
    if explicit_mesh((x, w_gate_up, w_down)) is None:
        return specs
    spec = jax.typeof(x).sharding.spec
    into = with_shardings(specs.into, x, w_gate_up, spec)
    return specs._replace(into=into, down=with_shardings(specs.down, x, w_down, spec))
