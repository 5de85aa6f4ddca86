"""moe_mlp: the SwiGLU MLP of each group's expert, FP8 inside, with its own derivatives.

For the rows of group i of x (m, d) and of the cotangent dout (m, d), with w_gate_up (g, d, 2 f) and
w_down (g, f, d), in brackets the scale blocks of each operand along the contraction:

    gate_up       = x   [1x128 along d]    . w_gate_up[i] [128x128]              1d2d
    h             = silu(gate) * up                                              _swiglu.py
    out           = h   [1x128 along f]    . w_down[i]    [128x128]              1d2d

    dh            = dout [1x128 along d]   . w_down[i]^T  [128x128]              1d2d, out's values
    da            = [dgate, dup], from gate_up and dh                            _swiglu.py
    dx            = da  [1x128 along 2 f]  . w_gate_up[i]^T [128x128]            1d2d, gate_up's
    dw_down[i]    = h^T [1x128 along rows] . dout [1x128 along rows]             1d1d
    dw_gate_up[i] = x^T [1x128 along rows] . da   [1x128 along rows]             1d1d

Of all activations only gate_up, dh, out and dx are stored unquantised; accumulation is f32.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm import _checks, _groups
from jax_fp8gemm._explicit import with_auto_axes
from jax_fp8gemm._matmul_spec import (
    MatmulSpec,
    check_precision,
    kernel_dtype,
    make_spec,
    name_residual,
    quantize_args,
)
from jax_fp8gemm._primitive import match_varying
from jax_fp8gemm._quantize import Implementation, quantize
from jax_fp8gemm._quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm._ragged_dot import gemm_as, ragged_dot, wgrad_as
from jax_fp8gemm._recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._swiglu import swiglu, swiglu_grad_quantize, swiglu_quantize
from jax_fp8gemm._weights import both_ways, check_weights, transposed, without_gradient

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_OP = "moe_mlp"


@jax.named_scope("fp8gemm_moe_mlp")
def moe_mlp(
    x: Float[Array, "m d"],
    w_gate_up: Float[Array, "g d two_f"] | ScaledArray,
    w_down: Float[Array, "g f d"] | ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    recipe: Recipe = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, "m d"]:
    """Applies to each group of rows its own expert: (silu(x . gate) * (x . up)) . down.

    Differentiable once, in reverse mode. Any m, d, f and up to 1024 groups of any sizes, which stay
    on the device. vmap runs one element after another.

    Args:
      x: (m, d) bf16, f16 or f32, rows sorted by group.
      w_gate_up: (g, d, 2 f) bf16, f16 or f32: columns 0..f-1 are the gate's, the others up's; or a
        ScaledArray with block (128, 128), quantised once for many calls, without a gradient. Give
        it `transposed` (quantize with_transpose=True), which is what the product reads.
      w_down: (g, f, d), likewise.
      group_sizes: (g,) int32 or int64. A negative size counts as 0, rows past m as none. Rows past
        the sum are zero in the result and in the gradient, whatever x holds there.
      recipe: formats and scale blocks. BF16: jax.lax.ragged_dot, in the dtype of x. With
        wgrad="bf16" activations are stored unquantised, as two calls of ragged_dot would.
      implementation: as for ragged_dot.
    Returns:
      (m, d) array of the dtype of x, and sharded as x over Explicit mesh axes. Gradients have the
      dtypes of their operands, that of an empty group is zero; group_sizes has none.
    Raises:
      TypeError: a dtype. ValueError: shapes, implementation, scale block.
      NotImplementedError: a second derivative.
      RuntimeError: implementation="cuda" where the kernels cannot run.

    The backward pass keeps x and h quantised along the rows ("fp8gemm_lhs"), the weights
    ("fp8gemm_rhs") and gate_up in bf16, f32 for an x in f16 or f32 ("fp8gemm_out"); so
    save_only_these_names can trade any of them for being computed again.
    """
    check_experts(_OP, x, w_gate_up, w_down)
    _check_group_sizes(group_sizes, w_down.shape[0])
    weight = lambda w: None if isinstance(w, ScaledArray) else w
    kept = kernel_dtype(x.dtype)
    into = make_spec(_OP, x, weight(w_gate_up), recipe, kept, implementation)
    h = jax.ShapeDtypeStruct((x.shape[0], w_down.shape[1]), kept)
    down = make_spec(_OP, h, weight(w_down), recipe, x.dtype, implementation)
    check_precision(_OP, None, into)
    w_gate_up = without_gradient(_OP, "w_gate_up", w_gate_up)
    w_down = without_gradient(_OP, "w_down", w_down)
    groups = _groups.as_int32(group_sizes), jnp.zeros((1,), jnp.int32)
    operands = jax.tree.map(jnp.asarray, (x, w_gate_up, w_down, groups))
    run = partial(_unfused_mlp, recipe, implementation)
    if recipe.is_fp8 and recipe.wgrad == "fp8":
        run = partial(_mlp, (into, down))
    out_spec = lambda: jax.typeof(operands[0]).sharding.spec
    return with_auto_axes(lambda *xs: run(*match_varying(*xs)), operands, out_spec)


def check_experts(op: str, x: Any, w_gate_up: Any, w_down: Any) -> None:
    """Raises unless these are rows (m, d) and the weights of experts for them."""
    check_unquantised(op, "x", x)
    _checks.check_ndim(op, "x", x, 2, "(m, d)", hint=" Fold leading dimensions into m.")
    for name, w, layout in (
        ("w_gate_up", w_gate_up, "(g, d, 2 f)"),
        ("w_down", w_down, "(g, f, d)"),
    ):
        check_weights(op, name, w)
        _checks.check_ndim(op, name, w, 3, layout)
    (_, d), (g, f, _) = x.shape, w_down.shape
    if w_gate_up.shape != (g, d, 2 * f) or w_down.shape != (g, f, d):
        raise ValueError(
            f"{op}: x (m, d), w_gate_up (g, d, 2 f) and w_down (g, f, d) must share g, d and f; "
            f"got x {_checks.short_type(x)}, w_gate_up {_checks.short_type(w_gate_up)}, "
            f"w_down {_checks.short_type(w_down)}"
        )


def _check_group_sizes(group_sizes: Any, g: int) -> None:
    _checks.check_array(_OP, "group_sizes", group_sizes)
    _groups.check_group_sizes(_OP, group_sizes)
    if group_sizes.shape != (g,):
        raise ValueError(
            f"{_OP}: group_sizes must have one size for each of the {g} experts; "
            f"got group_sizes {_checks.short_type(group_sizes)}"
        )


def _unfused_mlp(recipe: Recipe, implementation, x, w_gate_up, w_down, groups) -> jax.Array:
    if not recipe.is_fp8:
        in_dtype = lambda w: (
            w.dequantize(x.dtype) if isinstance(w, ScaledArray) else w.astype(x.dtype)
        )
        w_gate_up, w_down = in_dtype(w_gate_up), in_dtype(w_down)
    product = partial(
        ragged_dot,
        group_sizes=groups[0],
        preferred_element_type=x.dtype,
        recipe=recipe,
        implementation=implementation,
    )
    h = swiglu(product(x, w_gate_up)).astype(x.dtype)
    return product(h, w_down)


Specs = tuple[MatmulSpec, MatmulSpec]  # of the products with w_gate_up and with w_down
Groups = tuple[jax.Array, jax.Array]  # group_sizes, and the row where the first group starts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(specs: Specs, x: jax.Array, w_gate_up: Any, w_down: Any, groups: Groups) -> jax.Array:
    into, down = specs
    args = quantize_args(into, into.recipe.fwd)
    rows, w_gate_up = quantize(x, **args), transposed(into, w_gate_up)
    gate_up = gemm_as(into, into.out_dtype, rows, w_gate_up, *groups)
    h, _ = swiglu_quantize(gate_up, *groups, with_columns=False, **args)
    return gemm_as(down, down.out_dtype, h, transposed(down, w_down), *groups)


def _mlp_fwd(specs: Specs, x, w_gate_up: Any, w_down: Any, groups: Groups) -> tuple[Any, Any]:
    """Quantises for both passes; under jit, what no wanted cotangent reads is not computed."""
    into, down = specs
    args = quantize_args(into, into.recipe.fwd)
    w_gate_up, w_gate_up_transposed = both_ways(into, into.recipe.fwd, w_gate_up)
    w_down, w_down_transposed = both_ways(down, down.recipe.fwd, w_down)
    rows, x_columns = _rows_and_columns(into, x, groups, args)
    gate_up = gemm_as(into, into.out_dtype, rows, w_gate_up_transposed, *groups)
    gate_up = name_residual("out", gate_up)
    has_gradient = down.rhs_dtype is not None
    h, h_columns = swiglu_quantize(gate_up, *groups, with_columns=has_gradient, **args)
    out = name_residual("out", gemm_as(down, down.out_dtype, h, w_down_transposed, *groups))
    columns = name_residual("lhs", (x_columns, h_columns))
    weights = name_residual("rhs", (w_gate_up, w_down))
    return out, (*columns, *weights, gate_up, groups)


def _mlp_bwd(specs: Specs, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    x_columns, h_columns, w_gate_up, w_down, gate_up, groups = residuals
    into, down = specs
    args = quantize_args(into, into.recipe.bwd)
    rows, dout_columns = _rows_and_columns(down, dout, groups, args)
    with jax.named_scope("dlhs"):
        dh = gemm_as(down, down.lhs_dtype, rows, w_down, *groups)
    has_gradient = into.rhs_dtype is not None
    rows, da_columns = swiglu_grad_quantize(gate_up, dh, *groups, with_columns=has_gradient, **args)
    with jax.named_scope("dlhs"):
        dx = gemm_as(into, into.lhs_dtype, rows, w_gate_up, *groups)
    with jax.named_scope("drhs"):
        dw_gate_up = _wgrad(into, x_columns, da_columns, groups)
        dw_down = _wgrad(down, h_columns, dout_columns, groups)
    return dx, dw_gate_up, dw_down, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _rows_and_columns(spec: MatmulSpec, x: jax.Array, groups: Groups, args) -> tuple[Any, Any]:
    """x along its rows, and ragged columns where the product's rhs has a gradient."""
    if spec.rhs_dtype is None:
        return quantize(x, **args), None
    return rows_and_ragged_columns(x, *groups, **args)


def _wgrad(spec: MatmulSpec, lhs: Any, dout: Any, groups: Groups) -> jax.Array | None:
    if spec.rhs_dtype is None:
        return None
    return wgrad_as(spec, spec.rhs_dtype, lhs, dout, groups[0])
