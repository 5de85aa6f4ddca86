"""moe_layer with an expert_axis: the experts of a mixture lie along a mesh axis."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8gemm._ops.weights import refusing_gradients
from jax_fp8gemm._sharding.explicit_axes import with_auto_axes
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm.moe._operands import Inputs, Operands, Router
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._parallel.exchange import Name, NamePair
from jax_fp8gemm.moe._parallel.expert_spec import expert_spec, part_exchanges
from jax_fp8gemm.moe._parallel.layout import MeshLayout
from jax_fp8gemm.moe._parallel.mlp import expert_mlp
from jax_fp8gemm.moe._parallel.mlp_on_mesh import expert_mlp_on_mesh
from jax_fp8gemm.moe._parallel.unquantised import unquantised_layer


def expert_parallel(
    options: LayerOptions,
    axes: tuple[str, ...],
    exchange_name: Name | NamePair | None,
    inputs: Inputs,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the layer on one device's tokens (t, d) and experts, in a shard_map over `axes`.

    Returns the load of these tokens too.
    """
    x, router, w_gate_up, w_down, biases, bias = inputs
    sizes = tuple(map(lax.axis_size, axes))
    num_experts = math.prod(sizes) * w_gate_up.shape[0]
    indices, weights, load = options.choose(router, bias, num_experts)
    if x.size == 0:
        return jnp.zeros_like(x), load
    x = refusing_gradients(OP, dict(w_gate_up=w_gate_up, w_down=w_down), x)
    # Each device has tokens of its own, even if the operands do not vary. Its number does.
    me = lax.axis_index(axes)
    operands = Operands(x, indices, weights, w_gate_up, w_down, biases)
    operands, _ = match_varying(operands, me)
    where = axes, sizes, x.shape[0], num_experts
    exchanges = part_exchanges(options, exchange_name, *where, x, w_down)
    if not options.recipe.is_fused:
        return unquantised_layer(options, exchanges, operands), load
    spec = expert_spec(options, exchanges, num_experts, x, w_gate_up, w_down)
    return expert_mlp(spec, operands), load


def _pad_tokens(options: LayerOptions, layout: MeshLayout, inputs: Inputs) -> Inputs:
    """Returns the inputs with more tokens, which choose no expert, until they divide evenly.

    The router is then (indices, weights): no logits of a token choose no expert.
    """
    x, router, w_gate_up, _, _, bias = inputs
    num_experts = w_gate_up.shape[0]
    missing = -x.shape[0] % layout.num_devices
    if missing == 0:
        return inputs
    indices, weights, _ = options.choose(router, bias, num_experts)

    def pad(x: jax.Array, value: int) -> jax.Array:
        whole = layout.place(x, PartitionSpec())
        return jnp.pad(whole, [(0, missing), (0, 0)], constant_values=value)

    router = pad(indices, num_experts), pad(weights, 0)
    return inputs._replace(x=pad(x, 0), router=router, bias=None)


def _without_padding(layout: MeshLayout, out: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the rows of `out` that belong to the tokens x; if it drops rows, sharded as x."""
    if out.shape == x.shape:
        return out
    rows = layout.place(out, PartitionSpec())[: x.shape[0]]
    return layout.place(rows, jax.typeof(x).sharding.spec)


# NOTE: jitted for calls outside jit. There, a shard_map is compiled again for each new function
# that it maps, but a jitted function is found again by its static arguments. It is not inlined:
# with jax 0.10, the derivative would then run op by op.
@partial(jax.jit, static_argnums=(0, 1, 2))
def expert_parallel_on_mesh(
    options: LayerOptions,
    layout: MeshLayout,
    exchange_name: Name | NamePair | None,
    inputs: Inputs,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the layer on the tokens (m, d) and the experts of all devices.

    Returns the load of all tokens too.
    """
    out, load = _on_mesh(options, layout, exchange_name, _pad_tokens(options, layout, inputs))
    return _without_padding(layout, out, inputs.x), load


def _on_mesh(
    options: LayerOptions, layout: MeshLayout, exchange_name: Name | NamePair | None, inputs: Inputs
) -> tuple[jax.Array, jax.Array | None]:
    """Returns expert_parallel_on_mesh of tokens that divide evenly."""
    axes = layout.expert_axes
    if not options.recipe.is_fused:
        specs = *(layout.tokens,) * 2, *(layout.experts,) * 3, PartitionSpec()

        def run(*parts):
            out, load = expert_parallel(options, axes, exchange_name, Inputs(*parts))
            return out, _sum(load, layout)

        return layout.map(run, specs, (layout.tokens, PartitionSpec()))(*inputs)
    x, router, w_gate_up, w_down, biases, bias = inputs
    x = refusing_gradients(OP, dict(w_gate_up=w_gate_up, w_down=w_down), x)
    num_experts = w_gate_up.shape[0]
    is_nested = layout.is_nested and not isinstance(router, tuple)
    choose: Any = _choose_from_logits if is_nested else _choose
    indices, weights, load = choose(options, layout, num_experts, router, bias)
    if x.size == 0:
        return x, load
    tokens = x.shape[0] // layout.num_devices
    sizes = tuple(layout.mesh.shape[name] for name in axes)
    where = axes, sizes, tokens, num_experts
    exchanges = part_exchanges(options, exchange_name, *where, x, w_down)
    spec = expert_spec(options, exchanges, num_experts, x, w_gate_up, w_down)
    operands = Operands(x, indices, weights, w_gate_up, w_down, biases)
    return expert_mlp_on_mesh(spec, layout, operands), load


Choices: TypeAlias = tuple[jax.Array, jax.Array, jax.Array | None]  # as LayerOptions.choose


def _choose(
    options: LayerOptions,
    layout: MeshLayout,
    num_experts: int,
    router: Router,
    bias: jax.Array | None,
    check_vma: bool = True,
) -> Choices:
    """Returns the choices of the tokens of each device, and the load of all tokens."""

    def choose(router, bias):
        indices, weights, load = options.choose(router, bias, num_experts)
        return indices, weights, _sum(load, layout)

    results = layout.tokens, layout.tokens, PartitionSpec()
    run_on_mesh = layout.map(choose, (layout.tokens, PartitionSpec()), results, check_vma)
    return run_on_mesh(router, bias)


# NOTE: with check_vma, JAX cannot lower the gradient of a shard_map in another (0.10.2, 0.12.0.1).
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _choose_from_logits(
    options: LayerOptions,
    layout: MeshLayout,
    num_experts: int,
    logits: jax.Array,
    bias: jax.Array | None,
) -> Choices:
    """Runs _choose, in a shard_map over other axes."""
    return _choose(options, layout, num_experts, logits, bias, check_vma=False)


def _choose_fwd(options, layout, num_experts, logits, bias):
    return _choose_from_logits(options, layout, num_experts, logits, bias), (logits, bias)


def _choose_bwd(options, layout, num_experts, residuals, cotangents):
    """The weights of a token depend on its logits alone, so XLA may divide the tokens."""
    logits, bias = residuals

    def run(logits, bias, dweights):
        weights_of = lambda logits: options.choose(logits, bias, num_experts)[1]
        return jax.vjp(weights_of, logits)[1](dweights)[0]

    of_logits = lambda: jax.typeof(logits).sharding.spec
    return with_auto_axes(run, (logits, bias, cotangents[1]), of_logits), None


_choose_from_logits.defvjp(_choose_fwd, _choose_bwd)


def _sum(load: jax.Array | None, layout: MeshLayout) -> jax.Array | None:
    """Returns the sum of the loads of all devices."""
    return None if load is None else lax.psum(load, layout.token_axes)
