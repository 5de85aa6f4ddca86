"""A model of training a mixture of experts on many GPUs: FLOP, bytes and seconds of one device.

One micro-batch of `tokens` tokens a device, forward and backward, nothing computed twice. Experts
are balanced, a collective takes its bytes over its rate, and no latency is counted. docs/scaling.md
says what follows from it, in tables that tables.py writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fp8gemm.moe._parallel.exchange import RATES

Number = int | float
_GBPS = {name: rate.bytes_per_second / 1e9 for name, rate in RATES.items()}


@dataclass(frozen=True)
class Rates:
    """What an H200 does: measured in one host (benchmarks/results) where not marked as assumed.

    The time of grouped MLPs is a line through the two DeepSeek-V3 layers of `bench moe`, 8 experts
    of 4096 rows and 32 of 512, as they ran on 2026-11-23 at df33a7d.
    """

    dense_tflops: Number = 1028.0  # a SwiGLU MLP with all quantisation
    bf16_tflops: Number = 676.0
    attention_tflops: Number = 450.0  # assumed
    expert_tflops: Number = 1015.0
    weight_ps: Number = 1.389  # for each weight of an expert, whatever its rows
    bf16_expert_tflops: Number = 90.0  # jax.lax.ragged_dot
    gather_gbps: Number = (
        RATES["all_gather"].bytes_per_second / 1e9
    )  # and reduce_scatter, into a GPU
    all_to_all_gbps: Number = RATES["all_to_all"].bytes_per_second / 1e9
    ragged_all_to_all_gbps: Number = RATES["ragged_all_to_all"].bytes_per_second / 1e9
    network_gbps: Number = 40.0  # assumed: 80 % of 400 Gb/s a GPU
    gpus_per_host: int = 8


@dataclass(frozen=True)
class Axis:
    """A mesh axis: its size, and how many of its devices are in one host."""

    size: int
    local: int

    @property
    def elsewhere(self) -> float:
        """The share of a device's peers that are in other hosts."""
        return (self.size - self.local) / max(self.size - 1, 1)

    def gather_seconds(self, num_bytes: Number, rates: Rates) -> float:
        """Of an all_gather into, or a reduce_scatter out of, num_bytes on each device.

        The devices of a host share what enters it, each through its own network card.
        """
        p, local = self.size, self.local
        network = num_bytes * (p - local) / (p * local) / rates.network_gbps
        nvlink = num_bytes * (p - 1) / p / rates.gather_gbps if local > 1 else 0.0
        return max(network, nvlink) / 1e9

    def exchange_seconds(self, num_bytes: Number, local_gbps: Number, rates: Rates) -> float:
        """Of an exchange that sends num_bytes to the peers of each device, the same to all."""
        to_each = num_bytes / max(self.size - 1, 1)
        network = to_each * (self.size - self.local) / rates.network_gbps
        return max(network, to_each * (self.local - 1) / local_gbps) / 1e9


@dataclass(frozen=True)
class Model:
    """Sizes of a model with latent attention; the default is DeepSeek-V3 (config.json)."""

    hidden: int = 7168
    num_dense_layers: int = 3
    dense_inter: int = 18432
    num_moe_layers: int = 58
    num_experts: int = 256
    num_shared: int = 1
    top_k: int = 8
    inter: int = 2048
    num_heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    vocab: int = 129280

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.inter

    @property
    def attention_weights(self) -> int:
        into_q = self.q_rank * (self.hidden + self.num_heads * (self.nope_dim + self.rope_dim))
        into_kv = (self.kv_rank + self.rope_dim) * self.hidden
        from_kv = self.kv_rank * self.num_heads * (self.nope_dim + self.v_dim)
        return into_q + into_kv + from_kv + self.num_heads * self.v_dim * self.hidden

    @property
    def dense_weights(self) -> int:
        """All that every token passes but the embedding and the head."""
        moe = self.num_shared * self.expert_weights + self.num_experts * self.hidden
        dense = self.num_dense_layers * 3 * self.hidden * self.dense_inter
        return self.num_layers * self.attention_weights + dense + self.num_moe_layers * moe

    @property
    def routed_weights(self) -> int:
        return self.num_moe_layers * self.num_experts * self.expert_weights

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_layers(self) -> int:
        return self.num_dense_layers + self.num_moe_layers

    @property
    def num_weights(self) -> int:
        return self.dense_weights + self.routed_weights + 2 * self.head_weights

    def attention_flop(self, sequence: int) -> float:
        """Of one token: scores and values of half a sequence (causal), forward and backward."""
        forward = self.num_heads * sequence * (self.nope_dim + self.rope_dim + self.v_dim)
        return 3.0 * self.num_layers * forward


def expert_seconds(flop: Number, weights: Number, rates: Rates) -> float:
    """Forward and backward of grouped MLPs on one device."""
    return flop / rates.expert_tflops / 1e12 + weights * rates.weight_ps * 1e-12


def fsdp_bytes(weights: Number, is_fp8: bool, grad_bytes: int) -> Number:
    """Gathered once for each pass, with a scale for 128x128 of FP8; gradients scattered."""
    return weights * (2 * (1 + 4 / 128**2 if is_fp8 else 2) + grad_bytes)
