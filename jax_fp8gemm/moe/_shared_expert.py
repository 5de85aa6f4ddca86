"""The shared expert of a layer: a gated MLP that takes every token.

It runs as one group of the grouped products, by moe_mlp. So its activation is quantised as it is
computed, and on a mesh devices exchange FP8 columns for the gradients of its weights; two calls of
matmul would store the activation unquantised, and add f32 gradients. x is quantised once more: the
rows of the routed experts are copies, whose scales in an expert-parallel layer are powers of two.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.kept_rounding import add_rounded
from jax_fp8gemm._ops.weights import refusing_gradients
from jax_fp8gemm.moe._gated_mlp import check_gated_mlp, gated_mlp
from jax_fp8gemm.moe._operands import Weights
from jax_fp8gemm.moe._options import OP, LayerOptions

_NAMES = ("shared_expert[0]", "shared_expert[1]")


def check_shared_expert(shared_expert: Any, x: jax.Array) -> tuple[Weights, Weights] | None:
    """Returns the weights of the shared expert; raises unless they are for tokens x (m, d)."""
    if shared_expert is None:
        return None
    form = "(w_gate_up (d, 2 f), w_down (f, d))"
    weights = checks.check_pair(OP, "shared_expert", form, shared_expert)
    check_gated_mlp(OP, x, dict(zip(_NAMES, weights, strict=True)))
    return weights


@jax.named_scope("fp8gemm_shared_expert")
def add_shared_expert(
    options: LayerOptions, weights: tuple[Weights, Weights], x: jax.Array, out: jax.Array
) -> jax.Array:
    """Returns `out` (m, d) plus what the shared expert makes of the tokens x (m, d)."""
    sharding = jax.typeof(out).sharding
    x = refusing_gradients(OP, dict(zip(_NAMES, weights, strict=True)), x)
    experts = list(weights)
    if sharding.mesh.explicit_axes:
        whole = sharding.update(spec=PartitionSpec())
        x = jax.sharding.reshard(x, sharding)
        experts = jax.tree.map(
            lambda w: jax.sharding.reshard(w, whole) if jax.typeof(w).sharding.mesh.empty else w,
            experts,
        )
    added = gated_mlp(x, *experts, **options.of_mlp)
    return add_rounded(out, added) if options.recipe.batch_invariant else out + added
