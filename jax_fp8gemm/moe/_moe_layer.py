"""moe_layer: a mixture-of-experts layer, on one device or on a mesh."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Required, TypeAlias, Unpack, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._data.activation import Activation, check_activation
from jax_fp8gemm._data.devices import naming_devices
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_unquantised
from jax_fp8gemm._ops.product_spec import Weights, check_recipe
from jax_fp8gemm._ops.reverse_mode import reverse_mode
from jax_fp8gemm._sharding.manual_axes import settle
from jax_fp8gemm.moe._biases import check_biases
from jax_fp8gemm.moe._layer_arguments import (
    check_layer_pieces,
    check_mesh,
    check_options,
    fit_routing,
    fold,
    fold_router,
)
from jax_fp8gemm.moe._local_layer import local_layer
from jax_fp8gemm.moe._mlp_specs import check_experts
from jax_fp8gemm.moe._operands import Inputs, Operands
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._parallel.exchange import Name, NamePair
from jax_fp8gemm.moe._parallel.exchange_kinds import AxisName
from jax_fp8gemm.moe._parallel.layer import expert_parallel, expert_parallel_on_mesh
from jax_fp8gemm.moe._parallel.layout import axis_names, is_manual, lay_out
from jax_fp8gemm.moe._parallel.parts import NumParts
from jax_fp8gemm.moe._permute import check_top_k
from jax_fp8gemm.moe._routing import RouteArguments, Routing
from jax_fp8gemm.moe._run_arguments import RunArguments
from jax_fp8gemm.moe._scoring import Scoring
from jax_fp8gemm.moe._shared_expert import add_shared_expert, check_shared_expert

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32

# Logits, or indices and weights.
_Router: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]


class _Arguments(RouteArguments, RunArguments, total=False):
    """The keywords of moe_layer beside return_load."""

    top_k: int | None
    biases: tuple[Array, Array] | None
    activation: Activation
    shared_expert: tuple[Weights, Weights] | None


class _WithoutLoad(_Arguments, total=False):
    """The keywords of a call that returns y."""

    return_load: Literal[False]


class _WithLoad(_Arguments, total=False):
    """The keywords of a call that returns y and the load."""

    return_load: Required[Literal[True]]


@overload
def moe_layer(
    x: Array, router: _Router, w_gate_up: Weights, w_down: Weights, **how: Unpack[_WithoutLoad]
) -> Array: ...


@overload
def moe_layer(
    x: Array, router: _Router, w_gate_up: Weights, w_down: Weights, **how: Unpack[_WithLoad]
) -> tuple[Array, Array]: ...


@naming_devices
@jax.named_scope("fp8gemm_moe_layer")
def moe_layer(
    x: Float[Array, "*batch d"],
    router: Float[Array, "*batch num_experts"]
    | tuple[Int[Array, "*batch top_k"], Float[Array, "*batch top_k"]],
    w_gate_up: Float[Array, "num_experts d two_f"] | QuantizedWeight | ScaledArray,
    w_down: Float[Array, "num_experts f d"] | QuantizedWeight | ScaledArray,
    *,
    top_k: int | None = None,
    return_load: bool = False,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    bias: Float[Array, " num_experts"] | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    scale: float = 1.0,
    biases: tuple[Float[Array, "num_experts two_f"], Float[Array, "num_experts d"]] | None = None,
    activation: Activation = "silu",
    shared_expert: tuple[
        Float[Array, "d two_shared_f"] | QuantizedWeight | ScaledArray,
        Float[Array, "shared_f d"] | QuantizedWeight | ScaledArray,
    ]
    | None = None,
    recipe: Recipe | str = DEEPSEEK_V3,
    implementation: Implementation = None,
    gate_up_pieces: int = 1,
    expert_axis: AxisName | None = None,
    exchange: Name | NamePair | None = None,
    parts: NumParts | None = 1,
    capacity_factor: float | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, "*batch d"] | tuple[Float[Array, "*batch d"], Int32[Array, " num_experts"]]:
    """Sends each token through top_k experts and adds up their results by weight.

    It is differentiable once, in reverse mode, in x, the logits or weights, w_gate_up and w_down.

    Args:
      x: (..., d) bf16, f16 or f32: the tokens.
      router: (..., num_experts) logits, from which `route` chooses; or (indices, weights), each
        (..., top_k), a choice made elsewhere, as `permute` and `unpermute` take it.
      w_gate_up, w_down: the weights of num_experts experts, as for moe_mlp.
      top_k: the number of experts of each token. Logits need it.
      return_load: whether to return the load too.
      scoring, normalize, bias, n_group, topk_group, scale: as for route. They go with logits only.
      biases, activation, recipe, implementation: as for moe_mlp. Biases are cut as the experts are.
      gate_up_pieces: as for moe_mlp; that of the shared expert, too. It goes without expert_axis:
        in a shard_map over an axis that cuts features, each device has a gate | up of its own.
      shared_expert: None, or (w_gate_up (d, 2 f), w_down (f, d)): the weights of an MLP with the
        same activation and no biases, whose result for every token is added (DeepSeek-V3). f may
        differ from that of the other experts. Otherwise they are as w_gate_up and w_down. Over
        expert_axis they are replicated; in a shard_map each device passes all of them.
      expert_axis: the mesh axis, or axes, along which the experts lie. Each device has num_experts
        / size of them. In a shard_map over the axis, x and router are those of this device, and
        w_gate_up and w_down are its experts. Elsewhere, the layer makes a shard_map over all axes
        of the mesh. It cuts the tokens (the leading dimensions of x, as one) along all axes. If
        they do not divide evenly, it adds tokens that choose no expert, and drops their results.
      exchange: how tokens travel along expert_axis: "all_gather", "all_to_all" or
        "ragged_all_to_all" (docs/scaling.md). None takes the one of the first two that the sizes
        make faster. All give the same bits, except that "all_to_all" may need further turns, which
        add in another order. It goes with expert_axis only. With an expert_axis of two axes,
        (hosts, devices of a host), it may be a pair of these, one for each axis: a token then goes
        once to each host that needs it, and on from there. Results are added in each host first,
        which gives other bits (docs/numerics.md).
      parts: into how many parts each device divides its tokens: 1, 2 or 4. While the experts
        compute one part, the tokens of the next one and the results of the one before travel, if
        XLA's latency-hiding scheduler is on (docs/sharding.md). None takes the number that the
        sizes make fastest. Results and gradients of tokens have the same bits in any number of
        parts that takes one turn each. Gradients of weights and biases have others. Devices of
        fewer tokens have fewer parts. It goes with expert_axis only.
      capacity_factor: None or inf: no token is dropped. Otherwise an expert takes its first
        capacity_factor * tokens * top_k / num_experts choices, rounded up; later ones count as no
        expert. With expert_axis, these are the tokens of each device.
      mesh: the mesh of expert_axis, and goes with it only. The default is the mesh of jax.set_mesh
        or of the operands.
    Returns:
      (..., d) array of the dtype of x. With expert_axis and an FP8 recipe, x and the cotangent
      travel as FP8 with power-of-two scales. Results travel in the dtype of x, or as FP8 if the
      recipe has fp8_combine.
      With return_load also the load, (num_experts,) int32: how many choices name each expert,
      before capacity_factor drops any. It counts all tokens that the call is given. In a shard_map
      over expert_axis those are the tokens of this device: add up with jax.lax.psum.
    Raises:
      ValueError: shared_expert, expert_axis, exchange, parts, capacity_factor, arguments that do
        not go together, experts that do not divide evenly, tokens that do not with a
        capacity_factor, and whatever the functions of this module raise it for.
      TypeError: mesh, capacity_factor, any traced argument that is no array, and likewise.
    """
    x, w_gate_up, w_down = map(arrays.as_array, (x, w_gate_up, w_down))
    routing = Routing(scoring, normalize, n_group, topk_group, scale)
    check_options(router, top_k, routing, bias, return_load, capacity_factor)
    check_mesh(expert_axis, exchange, parts, mesh)
    recipe = check_recipe(OP, recipe)
    checks.check_implementation(OP, implementation)
    check_activation(OP, activation)
    check_unquantised(OP, "x", x)
    checks.check_min_ndim(OP, "x", x, 1, "(..., d)")
    tokens = fold("x", x, x)
    check_experts(OP, tokens, w_gate_up, w_down)
    router = fold_router(router, x, top_k)
    both = check_biases(OP, biases, w_gate_up, w_down)
    shared = check_shared_expert(shared_expert, tokens)
    pieces = check_layer_pieces(gate_up_pieces, expert_axis, w_gate_up, shared)
    top_k, routing, bias = fit_routing(router, top_k, routing, bias)
    check_top_k(OP, top_k, x)
    num_columns = tokens.shape[0] * top_k + 127 * w_gate_up.shape[0]
    checks.check_count(OP, "tokens * top_k + 127 num_experts", num_columns, x)
    options = LayerOptions(
        top_k,
        routing,
        return_load,
        capacity_factor,
        parts,
        recipe,
        implementation,
        activation,
        pieces,
    )
    run = partial(_run, options, expert_axis, exchange, mesh)
    if recipe.is_fused:
        run = partial(reverse_mode, OP, run)
    out, load = run(Inputs(tokens, router, w_gate_up, w_down, both, bias))
    if shared is not None:
        out = add_shared_expert(options, shared, tokens, out)
    out = _unfold(out, x)
    return out if load is None else (out, load)


def _run(
    options: LayerOptions,
    expert_axis: AxisName | None,
    exchange: Name | NamePair | None,
    mesh: Mesh | AbstractMesh | None,
    inputs: Inputs,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the layer on one device or, with an expert_axis, on many. Returns the load too."""
    x, router, w_gate_up, w_down, biases, bias = inputs
    if expert_axis is None:
        indices, weights, load = options.choose(router, bias, w_gate_up.shape[0])
        operands = Operands(x, indices, weights, w_gate_up, w_down, biases)
        return local_layer(options, operands), load
    experts = (w_gate_up, w_down, biases)
    w_gate_up, w_down, biases = jax.tree.map(lambda w: settle(OP, w), experts)
    names = axis_names(expert_axis, exchange)
    inputs = Inputs(x, router, w_gate_up, w_down, biases, bias)
    if not is_manual(names):
        layout = lay_out(options, inputs, names, mesh)
        return expert_parallel_on_mesh(options, layout, exchange, inputs)
    if mesh is not None:
        raise ValueError(
            f"{OP}: mesh must be None inside a shard_map over expert_axis; "
            f"got {checks.short_repr(mesh)}"
        )
    return expert_parallel(options, names, exchange, inputs)


def _unfold(out: jax.Array, x: Any) -> jax.Array:
    """Returns `out` (m, d) in the shape of x.

    Explicit axes cut the first dimension of x as they cut m, as far as it divides evenly.
    """
    sharding = jax.typeof(out).sharding
    axes = sharding.spec[0] if x.ndim > 2 else None
    if axes is not None:
        axes = axes if isinstance(axes, tuple) else (axes,)
        while x.shape[0] % math.prod(sharding.mesh.shape[name] for name in axes):
            axes = axes[:-1]
        out = jax.sharding.reshard(out, sharding.update(spec=PartitionSpec(axes or None, None)))
    return out.reshape(x.shape)
