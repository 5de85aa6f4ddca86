"""Which layout of a mesh trains a model fastest, by the model of model.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.scaling.exchanges import Exchange, exchange
from benchmarks.scaling.hierarchy import pair_exchange
from benchmarks.scaling.model import Axis, Model, Number, Rates, expert_seconds, fsdp_bytes
from jax_fp8gemm.moe._parallel.exchange import HEADROOM

# Of a weight: master, two moments and the gradient in f32; all but the master in bf16.
STATE_BYTES = {"f32": 4 + 3 * 4, "bf16": 4 + 3 * 2}


@dataclass(frozen=True)
class Layout:
    """A mesh (fsdp_outer, expert, fsdp_inner, tensor), its last axes within a host.

    All four cut the tokens. Experts are cut over `expert`, and the weights of each over the other
    three; dense weights over all four, where `tensor` leaves them cut while they are used.
    """

    fsdp_outer: int
    expert: int
    fsdp_inner: int
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.fsdp_outer * self.expert * self.fsdp_inner * self.tensor

    def expert_axis(self, host: int) -> Axis:
        inner = self.fsdp_inner * self.tensor
        return Axis(self.expert, _local(host, inner, self.expert))

    def expert_fsdp_axis(self, host: int) -> Axis:
        """What the weights of one expert are gathered over."""
        inner = self.fsdp_inner * self.tensor
        local = inner * _local(host, inner * self.expert, self.fsdp_outer)
        return Axis(inner * self.fsdp_outer, local)

    def dense_axis(self, host: int) -> Axis:
        size = self.num_devices // self.tensor
        return Axis(size, _local(host, self.tensor, size))


def _local(host: int, stride: int, size: int) -> int:
    """How many devices of an axis are in one host, `stride` being the product of those within."""
    return min(size, max(1, host // stride))


@dataclass(frozen=True)
class Work:
    """What is done and how: everything but the layout.

    Attributes:
      tokens: of one micro-batch, on each device.
      is_fp8: what tokens and weights travel as. Products are in FP8 (the head's in bf16) anyway.
      grad_bytes: of a gradient as it is summed over the mesh.
      has_pair: whether tokens may travel along hosts and their devices, once to each host.
      max_hosts: the most hosts that a token needs; None without such a limit.
    """

    tokens: int
    model: Model = Model()
    rates: Rates = Rates()
    is_fp8: bool = True
    sequence: int = 4096
    headroom: Number = HEADROOM
    grad_bytes: int = 4
    has_pair: bool = False
    max_hosts: int | None = None


@dataclass(frozen=True)
class Plan:
    """One micro-batch on one device, all layers."""

    layout: Layout
    flop: Number
    compute_seconds: float
    exchange: Exchange
    gathered_bytes: Number  # weights and gradients
    gather_seconds: float
    tensor_seconds: float

    @property
    def seconds(self) -> float:
        """Gathers run beside the products; tokens and tensor parallelism are waited for."""
        waited = self.exchange.seconds + self.tensor_seconds
        return max(self.compute_seconds, self.gather_seconds) + waited

    @property
    def all_hidden_seconds(self) -> float:
        moving = self.exchange.seconds + self.gather_seconds + self.tensor_seconds
        return max(self.compute_seconds, moving)


def plan(layout: Layout, work: Work) -> Plan:
    flop, compute_seconds = _compute(layout, work)
    gathered, gather_seconds = _gathers(layout, work)
    return Plan(
        layout=layout,
        flop=flop,
        compute_seconds=compute_seconds,
        exchange=_exchange(layout, work),
        gathered_bytes=gathered,
        gather_seconds=gather_seconds,
        tensor_seconds=_tensor_seconds(layout, work),
    )


def best_plan(num_devices: int, work: Work, *, tensor: int | None = None) -> Plan:
    """The fastest of all layouts, or of those with this size of the axis `tensor`."""
    host = work.rates.gpus_per_host
    candidates = layouts(num_devices, work.model.num_experts, host)
    plans = [plan(layout, work) for layout in candidates if tensor in (None, layout.tensor)]
    return min(plans, key=lambda p: p.seconds)


def layouts(num_devices: int, num_experts: int, host: int) -> Iterator[Layout]:
    """All of powers of two that give each device as many experts."""
    powers = [1 << i for i in range(num_devices.bit_length())]
    for expert, inner, tensor in itertools.product(powers, repeat=3):
        rest, remainder = divmod(num_devices, expert * inner * tensor)
        if remainder == 0 and num_experts % expert == 0 and inner * tensor <= host:
            yield Layout(rest, expert, inner, tensor)


def _compute(layout: Layout, work: Work) -> tuple[Number, float]:
    """FLOP and seconds."""
    model, rates, tokens = work.model, work.rates, work.tokens
    routed = 6 * tokens * model.num_moe_layers * model.top_k * model.expert_weights
    dense, head = 6 * tokens * model.dense_weights, 6 * tokens * model.head_weights
    attention = tokens * model.attention_flop(work.sequence)
    seconds = (
        expert_seconds(routed, model.routed_weights / layout.expert, rates)
        + dense / rates.dense_tflops / 1e12
        + head / rates.bf16_tflops / 1e12
        + attention / rates.attention_tflops / 1e12
    )
    return routed + dense + head + attention, seconds


def _exchange(layout: Layout, work: Work) -> Exchange:
    """Of all layers, by the fastest of the strategies."""
    axis, model = layout.expert_axis(work.rates.gpus_per_host), work.model
    sizes = model.hidden, model.top_k, work.tokens, work.rates
    how: dict[str, Any] = dict(is_fp8=work.is_fp8, headroom=work.headroom)
    run = partial(exchange, **how)
    moves = [run("all_gather", axis, *sizes), run("all_to_all", axis, *sizes)]
    if work.has_pair and 1 < axis.local < axis.size:
        moves.append(pair_exchange(axis, *sizes, **how, max_hosts=work.max_hosts))
    one = min(moves, key=lambda moved: moved.seconds)
    n = model.num_moe_layers
    return replace(
        one,
        dispatch_bytes=n * one.dispatch_bytes,
        return_bytes=n * one.return_bytes,
        seconds=n * one.seconds,
        network_bytes=n * one.network_bytes,
    )


def _gathers(layout: Layout, work: Work) -> tuple[Number, float]:
    """Bytes into one device and seconds."""
    model, host = work.model, work.rates.gpus_per_host
    dense = layout.dense_axis(host)
    total, seconds = 0.0, 0.0
    for weights, axis, is_fp8 in (
        (model.routed_weights / layout.expert, layout.expert_fsdp_axis(host), work.is_fp8),
        (model.dense_weights / layout.tensor, dense, work.is_fp8),
        (2 * model.head_weights / layout.tensor, dense, False),
    ):
        num_bytes = fsdp_bytes(weights, is_fp8, work.grad_bytes)
        total += num_bytes * (axis.size - 1) / axis.size
        seconds += axis.gather_seconds(num_bytes, work.rates)
    return total, seconds


def _tensor_seconds(layout: Layout, work: Work) -> float:
    """Two blocks a layer; each gathers its input and scatters its result, in both passes."""
    axis = Axis(layout.tensor, layout.tensor)
    num_bytes = 2 * layout.tensor * work.tokens * work.model.hidden
    return 8 * work.model.num_layers * axis.gather_seconds(num_bytes, work.rates)
