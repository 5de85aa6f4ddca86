"""LayerOptions: the static arguments of moe_layer but for the mesh and the exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe
from jax_fp8gemm._sharding.manual_axes import replicate
from jax_fp8gemm.moe._choices import count_choices, limit
from jax_fp8gemm.moe._operands import Router
from jax_fp8gemm.moe._route import choose_experts
from jax_fp8gemm.moe._routing import Routing

OP = "moe_layer"  # the name of the layer in its errors


@dataclass(frozen=True)
class LayerOptions:
    """The checked arguments of moe_layer; hashable, so that a jitted function may take them."""

    top_k: int
    routing: Routing
    return_load: bool
    capacity_factor: float | None
    parts: int | None
    recipe: Recipe
    implementation: Implementation
    activation: Activation
    gate_up_pieces: int = 1

    @property
    def of_mlp(self) -> dict[str, Any]:
        """The arguments of moe_mlp and gated_mlp beside the arrays."""
        names = "activation", "gate_up_pieces", "recipe", "implementation"
        return {name: getattr(self, name) for name in names}

    def choose(
        self, router: Router, bias: jax.Array | None, num_experts: int
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the indices and the weights of the choices, each (m, top_k), and the load.

        A choice beyond the capacity of its expert has the index of no expert. The load counts it
        all the same. It is None unless return_load is set.
        """
        if isinstance(router, tuple):
            indices, weights = router
        elif router.shape[1] == num_experts:
            indices, weights = choose_experts(
                OP, self.top_k, self.routing, router, bias, self.recipe.batch_invariant
            )
        else:
            raise ValueError(
                f"{OP}: router must have one logit for each of the {num_experts} experts of "
                f"w_gate_up; got router {checks.short_type(router)}. In a shard_map over "
                "expert_axis, w_gate_up holds the experts of one device."
            )
        load = count_choices(replicate(OP, indices), num_experts) if self.return_load else None
        most = self.capacity(indices.size, num_experts)
        indices = indices if most is None else limit(indices, num_experts, most)
        return indices, weights, load

    @property
    def has_capacity(self) -> bool:
        """Whether an expert takes a limited number of choices."""
        return self.capacity_factor not in (None, math.inf)

    def capacity(self, num_choices: int, num_experts: int) -> int | None:
        """Returns how many of these choices an expert takes at most; None if it takes all."""
        if self.capacity_factor is None or not self.has_capacity:
            return None
        if not isinstance(num_choices, int):  # symbolic
            raise ValueError(
                f"{OP}: with a capacity_factor the number of tokens must be known; got "
                f"{num_choices} choices. Export one program for each number of tokens."
            )
        if self.capacity_factor >= num_experts:  # and the product may be beyond any float
            return num_choices
        return math.ceil(min(self.capacity_factor * num_choices / num_experts, num_choices))
