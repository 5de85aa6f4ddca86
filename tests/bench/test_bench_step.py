"""The benchmark of a training step: what it counts, and that it trains."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8gemm
from benchmarks.families import step
from benchmarks.families.moe import bf16_layer
from benchmarks.families.step import Block
from jax_fp8gemm import moe

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

DENSE = Block("tiny", 2, 64, hidden=128, heads=4, kv_heads=2, inter=256, head_dim=32)
MIXTURE = dataclasses.replace(DENSE, experts=4, top_k=2)


def test_flop_of_a_block():
    # By hand: q and o 128 x 128, k and v 128 x 64, three of 128 x 256; 64 tokens see 32 others.
    weights = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    attention = 2 * 2 * 32 * 128
    assert DENSE.flop == 128 * (6 * weights + 3 * attention)
    assert MIXTURE.flop - DENSE.flop == 128 * 6 * 2 * 3 * 128 * 256
    assert [block.tokens for block in step.BLOCKS] == [8192, 8192, 16384]


@pytest.mark.parametrize("block", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_block_trains_as_in_bf16(block):
    # jax.nn's attention on the CPU relies on promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ours = step.step_call(block, jax_fp8gemm.matmul, moe.moe_mlp)
        bf16 = step.step_call(block, jnp.matmul, bf16_layer(jax.lax.ragged_dot))
    losses = np.array([[float(call.run()) for _ in range(3)] for call in (ours, bf16)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
    assert (np.diff(losses) < 0).all()
    assert ours.peak_bytes is not None and ours.kernel == ""


def test_weights_quantised_once_train_as_in_each_microbatch():
    block = dataclasses.replace(MIXTURE, microbatches=2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        each, once = (
            step.step_call(block, jax_fp8gemm.matmul, moe.moe_mlp, is_quantised_once=is_once)
            for is_once in (False, True)
        )
    losses = [[float(call.run()) for _ in range(3)] for call in (each, once)]
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_peers_of_a_block():
    assert list(step.step_case(DENSE).peers) == ["xla_bf16"]
    assert list(step.step_case(MIXTURE).peers) == ["lax_ragged_dot", "tokamax"]
    microbatches = dataclasses.replace(DENSE, microbatches=2)
    assert list(step.step_case(microbatches).peers) == ["quantised_once", "xla_bf16"]
