"""The benchmark of a decoder's products: what it counts, and that its calls compute the same."""

import re

import jax
import jax.numpy as jnp
import pytest
import reference

from benchmarks.families import decode
from jax_fp8gemm import matmul
from jax_fp8gemm.moe import gated_mlp

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

TINY = decode.Decoder("tiny", 2, hidden=256, inter=384, heads=4, kv_heads=2, head_dim=64)


def test_weights_of_a_decoder():
    assert TINY.num_weights == 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 384)
    assert decode.LLAMA3_8B.num_weights == 8 * 218_103_808  # as a layer of Llama-3-8B has
    case = decode.decode_cases(decode.LLAMA3_8B)[2]
    assert case.labels["tokens"] == 8
    assert case.work.flop == 2 * 8 * 8 * 218_103_808


def _out(*how):
    return decode.decode_call(TINY, 3, *how).run()


def test_our_calls_have_the_same_bits_and_bf16_is_close():
    ours = _out(decode.quantised, matmul, gated_mlp)
    apart = _out(decode.quantised, decode.apart(matmul), decode.apart(gated_mlp))
    reference.assert_same_bits(apart, ours)
    bf16 = _out(decode.unquantised, jnp.matmul, decode.bf16_mlp)
    assert ours.shape == (3, 256)
    # 2.1e-3: two layers of FP8 products, each off by about 4 %, beside the residual. With e5m2 it
    # is four times as much.
    assert 1e-6 < reference.calc_diff(ours, bf16) < 4e-3


def test_which_kernels_run():
    """Of 4096 features, whose products get tiles of 32 columns and clusters that divide k."""
    d = decode.LLAMA3_8B
    weights = decode.Weights(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in d.shapes))
    quantised = jax.eval_shape(lambda ws: decode.Weights(*map(decode.quantised, ws)), weights)
    x = jax.ShapeDtypeStruct((8, d.hidden), jnp.bfloat16)

    def kernels(product, mlp):
        layer = jax.jit(lambda x, w: decode._layer(d, x, w, product, mlp))
        text = layer.trace(x, quantised).lower(lowering_platforms=("cuda",)).as_text()
        return sorted(re.findall(r"custom_call @jax_fp8gemm_(\w+)", text))

    assert kernels(matmul, gated_mlp) == ["gemm", *["quantizing_gemm"] * 5, "swiglu_quantize"]
    apart = kernels(decode.apart(matmul), decode.apart(gated_mlp))
    assert apart == [*["gemm"] * 6, *["quantize"] * 5, "swiglu_quantize"]
