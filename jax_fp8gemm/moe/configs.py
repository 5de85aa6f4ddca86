"""The mixtures of experts of published models, as data::

    config = configs.DEEPSEEK_V3
    moe_layer(x, logits, w_gate_up, w_down, bias=bias, **config.routing)

A preset names the layers of a model that route. Its dense layers, if it has any, are not in it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from typing import Any

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.activation import Activation, ClampedSwiglu, check_activation
from jax_fp8gemm.moe._routing import Routing, as_top_k, check_types, fit
from jax_fp8gemm.moe._scoring import Scoring


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts: sizes, router and activation.

    Attributes:
      hidden: d, the size of a token.
      intermediate: f, the size between the two products of an expert.
      num_experts: the experts that a router chooses from.
      top_k: the experts of each token.
      num_shared_experts: the experts of the same sizes that take every token, besides.
      scoring, normalize, n_group, topk_group, scale: the router, as for route.
      has_balance_bias: whether the router has a bias for the selection, which no gradient trains.
      has_router_bias: whether the logits have a bias, which is a parameter.
      weighs_tokens: whether the weight of a choice multiplies the token before its expert, and not
        what the expert returns. moe_layer does the latter.
      activation: of the experts, as for moe_mlp.
      has_expert_biases: whether both products of an expert add a bias.
    Raises:
      ValueError: a size that is no integer above 0, a top_k or groups that num_experts cannot
        have, an unknown scoring or activation. TypeError: an argument of another kind.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    scoring: Scoring = "softmax"
    normalize: bool = True
    n_group: int | None = None
    topk_group: int | None = None
    scale: float = 1.0
    has_balance_bias: bool = False
    has_router_bias: bool = False
    weighs_tokens: bool = False
    activation: Activation = "silu"
    has_expert_biases: bool = False

    def __post_init__(self) -> None:
        op, least = "MoEConfig", dict(hidden=1, intermediate=1, num_experts=1, num_shared_experts=0)
        for name, lowest in least.items():
            number = checks.as_index(given := getattr(self, name))
            if number is None or number < lowest:
                got = checks.short_repr(given)
                raise ValueError(f"{op}: {name} must be an integer, {lowest} or more; got {got}")
        routing = Routing(**{n: x for n, x in self.routing.items() if n != "top_k"})
        check_types(op, routing)
        experts = operator.index(self.num_experts)
        fit(op, routing, as_top_k(op, self.top_k, experts), experts)
        check_activation(op, self.activation)
        has = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("has_")}
        checks.check_bool(op, weighs_tokens=self.weighs_tokens, **has)

    @property
    def routing(self) -> dict[str, Any]:
        """The arguments of route and moe_layer beside the bias, which is an array."""
        names = "top_k", "scoring", "normalize", "n_group", "topk_group", "scale"
        return {name: getattr(self, name) for name in names}

    def scaled_down(
        self, *, hidden: int = 128, intermediate: int = 128, num_experts: int | None = None
    ) -> MoEConfig:
        """Returns the same block at small sizes, for tests on a CPU.

        num_experts: None keeps as many as the router needs to mean the same: 4 for each group, and
          twice top_k at least. Groups, top_k and all that is no size stay.
        """
        if num_experts is None:
            n_group, topk_group = self.n_group or 1, self.topk_group or 1
            least = -(-self.top_k // topk_group)  # in each group, so that those kept have top_k
            num_experts = n_group * max(4, least, -(-2 * self.top_k // n_group))
        return replace(self, hidden=hidden, intermediate=intermediate, num_experts=num_experts)


def _of_sizes(hidden: int, intermediate: int, num_experts: int, top_k: int) -> MoEConfig:
    """Returns the plain mixture of these sizes: softmax, SwiGLU, no shared expert, no bias."""
    return MoEConfig(hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=top_k)


DEEPSEEK_V3 = replace(
    _of_sizes(7168, 2048, 256, 8),
    num_shared_experts=1,
    scoring="sigmoid",
    n_group=8,
    topk_group=4,
    scale=2.5,
    has_balance_bias=True,
)
"""DeepSeek-V3, V3.1, V3.2 and R1. Source: inference/model.py and config_671B.json of
deepseek-ai/DeepSeek-V3; section 2.1.2 of its report."""

DEEPSEEK_V4_FLASH = replace(
    _of_sizes(4096, 2048, 256, 6),
    num_shared_experts=1,
    scoring="sqrtsoftplus",
    scale=1.5,
    has_balance_bias=True,
    activation=ClampedSwiglu(10.0),
)
"""DeepSeek-V4-Flash. Source: deepseek_v4 of transformers, whose defaults it is. The first 3 layers
look up the experts of a token by its id, and weigh them by the scores of their logits, as here:
router=(indices, weights) takes such choices. The limit is that of routed experts."""

DEEPSEEK_V4_PRO = replace(
    DEEPSEEK_V4_FLASH, hidden=7168, intermediate=3072, num_experts=384, scale=2.5
)
"""DeepSeek-V4-Pro. Source: its config.json. The rest is as in V4-Flash."""

KIMI_K2 = replace(DEEPSEEK_V3, num_experts=384, n_group=1, topk_group=1, scale=2.827)
"""Kimi K2. Source: config.json of moonshotai/Kimi-K2-Instruct; its code is DeepSeek-V3's."""

GLM_5 = replace(DEEPSEEK_V3, hidden=6144, n_group=1, topk_group=1)
"""GLM-5. Source: glm_moe_dsa of transformers, whose defaults it is."""

QWEN3_235B_A22B = _of_sizes(4096, 1536, 128, 8)
"""Qwen3-235B-A22B. Source: its config.json, and qwen3_moe of transformers."""

QWEN3_30B_A3B = _of_sizes(2048, 768, 128, 8)
"""Qwen3-30B-A3B. Source: its config.json, and qwen3_moe of transformers."""

GPT_OSS_120B = replace(
    _of_sizes(2880, 2880, 128, 4),
    activation=ClampedSwiglu(7.0, alpha=1.702, up_offset=1.0),
    has_router_bias=True,
    has_expert_biases=True,
)
"""gpt-oss-120b. Source: gpt_oss of transformers, whose defaults it is."""

LLAMA_4_MAVERICK = replace(
    _of_sizes(5120, 8192, 128, 1),
    num_shared_experts=1,
    scoring="sigmoid",
    normalize=False,
    weighs_tokens=True,
)
"""Llama 4 Maverick (17B-128E). Source: its config.json, and llama4 of transformers. With one choice
for each token, moe_layer(weights * x, (indices, ones), ...) is its block."""

MIXTRAL_8X7B = _of_sizes(4096, 14336, 8, 2)
"""Mixtral 8x7B. Source: its config.json, and mixtral of transformers."""
