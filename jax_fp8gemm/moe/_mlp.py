"""moe_mlp: the gated MLP of each group's expert, FP8 inside, with its own derivatives.

_mlp_products.py says what is computed, and in which format.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._data.activation import Activation, check_activation
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import Weights, check_recipe, type_of
from jax_fp8gemm._ops.ragged_dot import ragged_dot
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._ops.weights import refusing_gradients, unquantised
from jax_fp8gemm._primitives.gated import activate, halves
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh, reshard, with_auto_axes
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm._sharding.rule import padded_spec
from jax_fp8gemm.moe._biases import add_bias, check_biases
from jax_fp8gemm.moe._fused_mlp import fused_mlp
from jax_fp8gemm.moe._mlp_specs import (
    check_experts,
    check_num_experts,
    make_specs,
    with_operand_shardings,
)
from jax_fp8gemm.moe._operands import MlpOperands
from jax_fp8gemm.moe._pieces import check_pieces

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_OP = "moe_mlp"


@naming_devices
@jax.named_scope("fp8gemm_moe_mlp")
def moe_mlp(
    x: Float[Array, "m d"],
    w_gate_up: Float[Array, "g d two_f"] | QuantizedWeight | ScaledArray,
    w_down: Float[Array, "g f d"] | QuantizedWeight | ScaledArray,
    group_sizes: Int[Array, " g"],
    *,
    biases: tuple[Float[Array, "g two_f"], Float[Array, "g d"]] | None = None,
    activation: Activation = "silu",
    gate_up_pieces: int = 1,
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
        Which orientation to store is as for matmul. Or a QuantizedWeight, which has a gradient.
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
      gate_up_pieces: the number of pieces that the columns of w_gate_up, and of its bias, are laid
        out in (gate_up_to_pieces); f / gate_up_pieces must be a multiple of 128. A mesh axis whose
        size divides it may cut these columns, and the rows of w_down: then only the results are
        added up, and dx. With 1 gate | up is gathered.
      recipe: the formats and scale blocks. BF16 stands for jax.lax.ragged_dot in the dtype of x.
        With wgrad="bf16", activations are stored unquantised, as two calls of ragged_dot do.
      implementation: as for ragged_dot.
    Returns:
      (m, d) array of the dtype of x, sharded as x over Explicit mesh axes. Gradients have the
      dtypes of their operands. That of an empty group is zero. group_sizes has none.
    Raises:
      TypeError: a dtype is wrong.
      ValueError: shapes, activation, implementation or a scale block are wrong.
      NotImplementedError: a second derivative is taken.
      RuntimeError: implementation="cuda", and the kernels cannot run.

    The forward pass keeps for the backward pass: x and h quantised along the tokens of each group
    ("fp8gemm_lhs"), the weights ("fp8gemm_rhs"), and gate_up in bf16, or in f32 if x is f16 or f32
    ("fp8gemm_out"). With save_only_these_names, jax.checkpoint computes the others again. With
    kept_gate_up="fp8" in the recipe, gate_up is kept in FP8, and h has both of these names.
    """
    operands = map(arrays.as_array, (x, w_gate_up, w_down, group_sizes))
    x, w_gate_up, w_down, group_sizes = operands
    check_experts(_OP, x, w_gate_up, w_down)
    _check_group_sizes(group_sizes, w_down.shape[0])
    _groups.check_rows(_OP, x, x.shape[0], group_sizes)
    check_num_experts(_OP, w_gate_up.shape[0], w_gate_up)
    check_activation(_OP, activation)
    both = check_biases(_OP, biases, w_gate_up, w_down)
    pieces = check_pieces(_OP, "w_gate_up", w_gate_up, gate_up_pieces)
    recipe = check_recipe(_OP, recipe)
    specs = make_specs(_OP, x, w_gate_up, w_down, recipe, implementation, activation, pieces)
    x = refusing_gradients(_OP, dict(w_gate_up=w_gate_up, w_down=w_down), jnp.asarray(x))
    operands = (x, w_gate_up, w_down, both)
    x, w_gate_up, w_down, both = jax.tree.map(lambda w: settle(_OP, jnp.asarray(w)), operands)
    groups = _groups.Groups.of_sizes(replicate(_OP, _groups.sizes_as_int32(group_sizes)))
    operands = MlpOperands(*match_varying(x, w_gate_up, w_down, both, groups))
    if not recipe.is_fused:
        return _unfused_mlp(recipe, implementation, activation, pieces, operands)
    specs = with_operand_shardings(specs, *operands[:3])
    return reverse_mode(_OP, partial(fused_mlp, specs), operands)


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
    pieces: int,
    operands: MlpOperands,
) -> jax.Array:
    """Computes moe_mlp by two calls of ragged_dot, which stores activations unquantised."""
    x, w_gate_up, w_down, biases, groups = operands
    assert groups is not None
    if not recipe.is_fp8:
        w_gate_up, w_down = (
            w.dequantize(x.dtype) if isinstance(w, ScaledArray) else unquantised(w).astype(x.dtype)
            for w in (w_gate_up, w_down)
        )
    product = partial(
        ragged_dot,
        group_sizes=groups.sizes,
        preferred_element_type=x.dtype,
        recipe=recipe,
        implementation=implementation,
    )
    gate_up = product(x, w_gate_up, out_sharding=_gate_up_sharding(x, w_gate_up))
    gate_up_spec = _spec_of_whole_features(gate_up, pieces)
    gate_up = reshard(gate_up, gate_up_spec)
    if biases is not None:
        gate_up = add_bias(gate_up, biases.gate_up, groups)
    of_features = lambda: (gate_up_spec, gate_up_spec)
    gate, up = with_auto_axes(partial(halves, pieces=pieces), [gate_up], of_features)
    h = activate(gate, up, activation).astype(x.dtype)
    rows_spec, mesh = jax.typeof(x).sharding.spec, explicit_mesh([h])
    out_sharding = None if mesh is None else NamedSharding(mesh, rows_spec)
    out = reshard(product(h, w_down, out_sharding=out_sharding), rows_spec)
    return out if biases is None else add_bias(out, biases.down, groups)


def _gate_up_sharding(x: jax.Array, w_gate_up: Weights) -> NamedSharding | None:
    """Returns how Explicit axes cut gate_up: rows as x, and columns as w_gate_up over the others.

    None where no axis is Explicit.
    """
    mesh = explicit_mesh([x, w_gate_up])
    if mesh is None:
        return None
    rows, columns = padded_spec(jax.typeof(x))[0], padded_spec(type_of(w_gate_up))[-1]
    columns = tuple(axis for axis in columns if axis not in rows)
    return NamedSharding(mesh, PartitionSpec(rows or None, columns or None))


def _spec_of_whole_features(gate_up: jax.Array, pieces: int) -> PartitionSpec | None:
    """Returns how Explicit axes cut gate_up (m, 2 f) so that no device has half a feature alone.

    They may cut its columns between pieces. None where no axis is Explicit.
    """
    mesh = explicit_mesh([gate_up])
    if mesh is None:
        return None
    rows, axes = padded_spec(jax.typeof(gate_up))
    is_between = pieces % math.prod(mesh.shape[axis] for axis in axes) == 0
    return PartitionSpec(rows or None, axes if axes and is_between else None)
