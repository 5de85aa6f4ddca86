"""moe_mlp: the gated MLP of each group's expert, FP8 inside, with its own derivatives.

_mlp_products.py says what is computed, and in which format.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.activation import Activation, check_activation
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Format, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import (
    ProductSpec,
    check_recipe,
    name_residual,
    quantize_args,
)
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.ragged_dot import ragged_dot
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._primitives.gated import gated
from jax_fp8gemm._primitives.quantize_ragged import rows_and_ragged_columns
from jax_fp8gemm._sharding.explicit_axes import reshard
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm.moe import _mlp_products as products
from jax_fp8gemm.moe._biases import Biases, add_bias, check_biases
from jax_fp8gemm.moe._mlp_specs import (
    Specs,
    check_experts,
    check_num_experts,
    make_specs,
    with_operand_shardings,
)
from jax_fp8gemm.moe._operands import Weights, without_gradients

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_OP = "moe_mlp"
# The columns of x, what the products keep, the weights, and the groups.
_Kept: TypeAlias = tuple[ScaledArray | None, products.Residuals, products.Experts, _groups.Groups]


@naming_devices
@jax.named_scope("fp8gemm_moe_mlp")
def moe_mlp(
    x: Float[Array, "m d"],
    w_gate_up: Float[Array, "g d two_f"] | ScaledArray,
    w_down: Float[Array, "g f d"] | ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    biases: tuple[Float[Array, "g two_f"], Float[Array, "g d"]] | None = None,
    activation: Activation = "silu",
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
) -> Float[Array, "m d"]:
    """Applies to each group of rows its own expert: (act(x . gate) * (x . up)) . down.

    It is differentiable once, in reverse mode. m, d and f may be any, and so may the sizes of up to
    1024 groups, which stay on the device. vmap runs one element after another.

    Args:
      x: (m, d) bf16, f16 or f32, rows sorted by group.
      w_gate_up: (g, d, 2 f) bf16, f16 or f32. Columns 0..f-1 are the gate's, the others up's. Or a
        ScaledArray with block (128, 128), quantised once for many calls; it has no gradient.
        Which orientation to store is as for matmul.
      w_down: (g, f, d), likewise.
      group_sizes: (g,) integers. A negative size counts as 0, and a group ends at row m at the
        latest. Rows past the sum are zero in the result and in the gradient, whatever x holds
        there.
      biases: None, or (b_gate_up (g, 2 f), b_down (g, d)) bf16, f16 or f32, as in gpt-oss. They are
        added, in f32, to gate and up before the activation, and to each row of the result. Rows
        past the sum stay zero. XLA adds them, which reads and writes gate_up and the result once
        more. Their gradients are f32 sums over the rows of each group.
      activation: what act is: "silu", "gelu" (by erf), "gelu_tanh" or "relu2" (the square of relu);
        or a ClampedSwiglu, whose formula takes the place of act(gate) * up.
      recipe: the formats and scale blocks. BF16 stands for jax.lax.ragged_dot in the dtype of x.
        With wgrad="bf16", activations are stored unquantised, as two calls of ragged_dot do.
      implementation: as for ragged_dot.
    Returns:
      (m, d) array of the dtype of x, sharded as x over Explicit mesh axes. Gradients have the
      dtypes of their operands. That of an empty group is zero. group_sizes has none.
    Raises:
      TypeError: a dtype. ValueError: shapes, activation, implementation, scale block.
      NotImplementedError: a second derivative.
      RuntimeError: implementation="cuda" where the kernels cannot run.

    The forward pass keeps for the backward pass: x and h quantised along the tokens of each group
    ("fp8gemm_lhs"), the weights ("fp8gemm_rhs"), and gate_up in bf16, or in f32 if x is f16 or f32
    ("fp8gemm_out"). With save_only_these_names, jax.checkpoint computes the others again.
    """
    operands = map(arrays.as_array, (x, w_gate_up, w_down, group_sizes))
    x, w_gate_up, w_down, group_sizes = operands
    check_experts(_OP, x, w_gate_up, w_down)
    _check_group_sizes(group_sizes, w_down.shape[0])
    _groups.check_rows(_OP, x, x.shape[0], group_sizes)
    check_num_experts(_OP, w_gate_up.shape[0], w_gate_up)
    check_activation(_OP, activation)
    both = check_biases(_OP, biases, w_gate_up, w_down)
    recipe = check_recipe(_OP, recipe)
    specs = make_specs(_OP, x, w_gate_up, w_down, recipe, implementation, activation)
    w_gate_up, w_down = without_gradients(_OP, w_gate_up, w_down)
    operands = (x, w_gate_up, w_down, both)
    x, w_gate_up, w_down, both = jax.tree.map(lambda w: settle(_OP, jnp.asarray(w)), operands)
    groups = _groups.Groups.of_sizes(replicate(_OP, _groups.as_int32(group_sizes)))
    operands = match_varying(x, w_gate_up, w_down, both, groups)
    if not recipe.is_fused:
        return _unfused_mlp(recipe, implementation, activation, *operands)
    run = partial(_mlp, with_operand_shardings(specs, *operands[:3]))
    return reverse_mode(_OP, run, *operands)


def _check_group_sizes(group_sizes: Any, g: int) -> None:
    """Raises unless group_sizes is integers (g,)."""
    checks.check_array(_OP, "group_sizes", group_sizes)
    _groups.check_group_sizes(_OP, group_sizes)
    if group_sizes.shape != (g,):
        raise ValueError(
            f"{_OP}: group_sizes must have one size for each of the {g} experts; "
            f"got group_sizes {checks.short_type(group_sizes)}"
        )


def _unfused_mlp(
    recipe: Recipe,
    implementation: Implementation,
    activation: Activation,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
    biases: Biases | None,
    groups: _groups.Groups,
) -> jax.Array:
    """Computes moe_mlp by two calls of ragged_dot, which stores activations unquantised."""
    if not recipe.is_fp8:
        w_gate_up, w_down = (
            w.dequantize(x.dtype) if isinstance(w, ScaledArray) else w.astype(x.dtype)
            for w in (w_gate_up, w_down)
        )
    product = partial(
        ragged_dot,
        group_sizes=groups.sizes,
        preferred_element_type=x.dtype,
        recipe=recipe,
        implementation=implementation,
    )
    # No Explicit axis cuts columns, so the gate and up of a feature lie on the same device.
    gate_up = replicate(_OP, product(x, w_gate_up), from_dim=1)
    if biases is not None:
        gate_up = add_bias(gate_up, biases.gate_up, groups)
    h = gated(gate_up, activation).astype(x.dtype)
    out = reshard(product(h, w_down), jax.typeof(x).sharding.spec)
    return out if biases is None else add_bias(out, biases.down, groups)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    specs: Specs,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
    biases: Biases | None,
    groups: _groups.Groups,
) -> jax.Array:
    rows = quantize(x, **quantize_args(specs.into, specs.into.recipe.fwd))
    w = products.transposed_weights(specs, w_gate_up, w_down, biases)
    return products.forward(specs, rows, w, groups, is_differentiated=False)[0]


def _mlp_fwd(
    specs: Specs,
    x: jax.Array,
    w_gate_up: Weights,
    w_down: Weights,
    biases: Biases | None,
    groups: _groups.Groups,
) -> tuple[jax.Array, _Kept]:
    kept, w = products.weights_both_ways(specs, w_gate_up, w_down, biases)
    rows, x_columns = _rows_and_columns(specs.into, specs.into.recipe.fwd, x, groups)
    out, residuals = products.forward(specs, rows, w, groups, is_differentiated=True)
    return out, (name_residual("lhs", x_columns), residuals, kept, groups)


def _mlp_bwd(specs: Specs, kept: _Kept, dout: jax.Array) -> tuple[Any, ...]:
    x_columns, residuals, w, groups = kept
    douts, dout_columns = _rows_and_columns(specs.down, specs.into.recipe.bwd, dout, groups)
    columns = products.Columns(x_columns, dout_columns)
    gradients = products.backward(specs, residuals, w, douts, columns, groups, lambda: dout)
    return *gradients, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _rows_and_columns(
    spec: ProductSpec, fmt: Format | None, x: jax.Array, groups: _groups.Groups
) -> tuple[ScaledArray, ScaledArray | None]:
    """Quantises x along its last dimension, and along the tokens of each group if needed.

    A product reads the latter for the gradient of its weights.
    """
    args = quantize_args(spec, fmt)
    if spec.rhs_dtype is None:
        return quantize(x, **args), None
    return rows_and_ragged_columns(x, *groups, **args)
