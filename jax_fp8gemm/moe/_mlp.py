"""moe_mlp: the SwiGLU MLP of each group's expert, FP8 inside, with its own derivatives.

What is computed in which format: moe/_mlp_products.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    check_precision,
    kernel_dtype,
    make_spec,
    name_residual,
    quantize_args,
    with_shardings,
)
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.ragged_dot import ragged_dot
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.weights import check_weights, without_gradient
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm._primitives.swiglu_quantize import swiglu
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh, reshard
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm.moe._mlp_products import (
    Groups,
    Specs,
    backward,
    forward,
    transposed_weights,
    weights_both_ways,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_OP = "moe_mlp"


@naming_devices
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
      group_sizes: (g,) integers. A negative size counts as 0, rows past m as none. Rows past
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

    The backward pass keeps x and h quantised along the tokens of each group ("fp8gemm_lhs"), the
    weights ("fp8gemm_rhs") and gate_up in bf16, f32 for an x in f16 or f32 ("fp8gemm_out"); so
    save_only_these_names can trade any of them for being computed again.
    """
    operands = map(checks.as_array, (x, w_gate_up, w_down, group_sizes))
    x, w_gate_up, w_down, group_sizes = operands
    check_experts(_OP, x, w_gate_up, w_down)
    _check_group_sizes(group_sizes, w_down.shape[0])
    _groups.check_rows(_OP, x, x.shape[0], group_sizes)
    num_experts = w_gate_up.shape[0]
    specs = make_specs(_OP, x, w_gate_up, w_down, num_experts, recipe, implementation)
    w_gate_up = without_gradient(_OP, "w_gate_up", w_gate_up)
    w_down = without_gradient(_OP, "w_down", w_down)
    operands = jax.tree.map(lambda w: settle(_OP, jnp.asarray(w)), (x, w_gate_up, w_down))
    sizes = replicate(_OP, _groups.as_int32(group_sizes))
    operands = match_varying(*operands, (sizes, jnp.zeros((1,), jnp.int32)))
    if not recipe.is_fused:
        return _unfused_mlp(recipe, implementation, *operands)
    run = partial(_mlp, with_layer_shardings(specs, *operands[:3]))
    return reverse_mode(_OP, run, *operands)


def with_layer_shardings(specs: Specs, x: jax.Array, w_gate_up: Any, w_down: Any) -> Specs:
    """`specs` for operands on a mesh with Explicit axes: the result is sharded as x."""
    if explicit_mesh((x, w_gate_up, w_down)) is None:
        return specs
    into, down = specs
    spec = jax.typeof(x).sharding.spec
    return with_shardings(into, x, w_gate_up, spec), with_shardings(down, x, w_down, spec)


def check_experts(op: str, x: Any, w_gate_up: Any, w_down: Any) -> None:
    """Raises unless these are rows (m, d) and the weights of experts for them."""
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


def make_specs(
    op: str,
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    num_experts: int,
    recipe: Any,
    implementation: Implementation,
) -> Specs:
    """Checks what is static. num_experts: of one device."""
    if num_experts > _groups.MAX_GROUPS:
        raise ValueError(
            f"{op}: a device must hold at most {_groups.MAX_GROUPS} experts; got {num_experts}, "
            f"w_gate_up {checks.short_type(w_gate_up)}"
        )
    weight = lambda w: None if isinstance(w, ScaledArray) else w
    kept = kernel_dtype(x.dtype)
    into = make_spec(op, x, weight(w_gate_up), recipe, kept, implementation)
    h = jax.ShapeDtypeStruct((x.shape[0], w_down.shape[1]), kept)
    down = make_spec(op, h, weight(w_down), recipe, x.dtype, implementation)
    check_precision(op, None, into)
    return into, down


def _check_group_sizes(group_sizes: Any, g: int) -> None:
    checks.check_array(_OP, "group_sizes", group_sizes)
    _groups.check_group_sizes(_OP, group_sizes)
    if group_sizes.shape != (g,):
        raise ValueError(
            f"{_OP}: group_sizes must have one size for each of the {g} experts; "
            f"got group_sizes {checks.short_type(group_sizes)}"
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
    # Over Explicit axes: no feature's gate and up lie on different devices.
    gate_up = replicate(_OP, product(x, w_gate_up), from_dim=1)
    h = swiglu(gate_up).astype(x.dtype)
    return reshard(product(h, w_down), jax.typeof(x).sharding.spec)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(specs: Specs, x: jax.Array, w_gate_up: Any, w_down: Any, groups: Groups) -> jax.Array:
    rows = quantize(x, **quantize_args(specs[0], specs[0].recipe.fwd))
    w = transposed_weights(specs, w_gate_up, w_down)
    return forward(specs, rows, w, groups, is_differentiated=False)[0]


def _mlp_fwd(specs: Specs, x, w_gate_up: Any, w_down: Any, groups: Groups) -> tuple[Any, Any]:
    into, down = specs
    kept, w = weights_both_ways(specs, w_gate_up, w_down)
    rows, x_columns = _rows_and_columns(into, x, groups, quantize_args(into, into.recipe.fwd))
    out, residuals = forward(specs, rows, w, groups, is_differentiated=True)
    return out, (name_residual("lhs", x_columns), residuals, kept, groups)


def _mlp_bwd(specs: Specs, residuals: Any, dout: jax.Array) -> tuple[Any, ...]:
    x_columns, residuals, w, groups = residuals
    into, down = specs
    rows, dout_columns = _rows_and_columns(down, dout, groups, quantize_args(into, into.recipe.bwd))
    columns = x_columns, dout_columns
    return *backward(specs, residuals, w, rows, columns, groups), None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _rows_and_columns(spec: ProductSpec, x: jax.Array, groups: Groups, args) -> tuple[Any, Any]:
    """x quantised along its last dimension, and along the tokens of each group where the product's
    rhs has a gradient."""
    if spec.rhs_dtype is None:
        return quantize(x, **args), None
    return rows_and_ragged_columns(x, *groups, **args)
