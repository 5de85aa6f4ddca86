"""Operands: the arrays of a mixture-of-experts layer."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax

from jax_fp8gemm._data.groups import Groups
from jax_fp8gemm._ops.product_spec import Weights as Weights
from jax_fp8gemm.moe._biases import Biases

# Logits (m, num_experts), or the indices and the weights of choices made elsewhere.
Router: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]


class Inputs(NamedTuple):
    """The checked arrays that moe_layer is given, with the leading dimensions of x as one.

    Attributes:
      x: (m, d), the tokens.
      router: for each token its logits, or its choices.
      w_gate_up: (experts, d, 2 f), the weights of the experts.
      w_down: (experts, f, d), likewise.
      biases: None, or those of the experts.
      bias: (num_experts,), the bias of the logits' scores, or None.
    """

    x: jax.Array
    router: Router
    w_gate_up: Weights
    w_down: Weights
    biases: Biases | None
    bias: jax.Array | None


class MlpOperands(NamedTuple):
    """The checked arrays that moe_mlp or gated_mlp is given.

    Attributes:
      x: (m, d), rows sorted by group.
      w_gate_up: (g, d, 2 f), the weights of the experts; (d, 2 f) without groups.
      w_down: (g, f, d), likewise; (f, d) without groups.
      biases: None, or those of the experts.
      groups: the sizes and the first rows of the groups; None for gated_mlp, which has no biases.
    """

    x: jax.Array
    w_gate_up: Weights
    w_down: Weights
    biases: Biases | None
    groups: Groups | None


class Operands(NamedTuple):
    """The arrays of a layer whose tokens have chosen their experts, in the order of moe_layer.

    Attributes:
      x: (m, d), the tokens.
      indices: (m, top_k) int32, the expert of each choice. Any number that is not an expert's is no
        expert.
      weights: (m, top_k), the weight of each choice.
      w_gate_up: (experts, d, 2 f), the weights of the experts.
      w_down: (experts, f, d), likewise.
      biases: None, or those of the experts.
    """

    x: jax.Array
    indices: jax.Array
    weights: jax.Array
    w_gate_up: Weights
    w_down: Weights
    biases: Biases | None
