"""What the model of model.py predicts for single workloads, to be held against measurements."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling.exchanges import exchange
from benchmarks.scaling.model import Axis, Model, Number, Rates, expert_seconds, fsdp_bytes
from jax_fp8gemm.moe._parallel import choose_parts
from jax_fp8gemm.moe._parallel.exchange import HEADROOM, Name


@dataclass(frozen=True)
class Prediction:
    """One device, forward and backward."""

    flop: float
    compute_seconds: float
    moved_bytes: float
    moving_seconds: float

    @property
    def seconds_between(self) -> tuple[float, float]:
        """All communication hidden, and none."""
        slower = max(self.compute_seconds, self.moving_seconds)
        return slower, self.compute_seconds + self.moving_seconds


def predict_ep_layer(
    strategy: Name,
    p: int,
    tokens: int,
    *,
    num_experts: int,
    hidden: int,
    inter: int,
    top_k: int,
    rates: Rates,
    is_fp8: bool = True,
    headroom: Number = HEADROOM,
) -> Prediction:
    """One expert-parallel layer over p devices of one host."""
    moved = exchange(
        strategy, Axis(p, p), hidden, top_k, tokens, rates, is_fp8=is_fp8, headroom=headroom
    )
    flop = 18.0 * tokens * top_k * hidden * inter
    compute = expert_seconds(flop, num_experts // p * 3 * hidden * inter, rates)
    if not is_fp8:
        compute = flop / rates.bf16_expert_tflops / 1e12
    return Prediction(flop, compute, moved.dispatch_bytes + moved.return_bytes, moved.seconds)


def layer_seconds_in_parts(
    num_parts: int, strategy: Name, axis: Axis, tokens: int, model: Model, rates: Rates
) -> float:
    """One expert-parallel layer whose devices divide their tokens into parts.

    By the formulas of moe_layer's own choice (moe/_parallel/choose_parts.py), with the rates of
    this model.
    """
    moved = exchange(strategy, axis, model.hidden, model.top_k, tokens, rates)
    back = axis.exchange_seconds(moved.return_bytes, rates.all_to_all_gbps, rates)
    there = moved.seconds - back
    flop = 18.0 * tokens * model.top_k * model.hidden * model.inter
    weights = model.num_experts // axis.size * model.expert_weights
    products = expert_seconds(flop, weights, rates)
    # There, back and products of one pass; backward there are twice as many products.
    seconds = choose_parts.layer_seconds(num_parts, there / 2, back / 2, products / 3)
    return seconds + choose_parts.part_seconds(num_parts, weights, weight_bytes=2)


def predict_fsdp_mlps(
    num_layers: int,
    p: int,
    tokens: int,
    *,
    hidden: int,
    inter: int,
    rates: Rates,
    is_fp8: bool = True,
    grad_bytes: int = 4,
) -> Prediction:
    """A stack of SwiGLU MLPs whose weights are cut over the p devices of one host."""
    weights = num_layers * 3 * hidden * inter
    flop = 6.0 * tokens * weights
    compute = flop / (rates.dense_tflops if is_fp8 else rates.bf16_tflops) / 1e12
    num_bytes = fsdp_bytes(weights, is_fp8, grad_bytes)
    seconds = Axis(p, p).gather_seconds(num_bytes, rates)
    return Prediction(flop, compute, num_bytes * (p - 1) / p, seconds)
