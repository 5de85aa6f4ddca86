"""The benchmark of a model in Flax NNX: what it counts, which products are ours, that it trains."""

import contextlib
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import jax_fp8gemm
from benchmarks.families import model
from benchmarks.families.nnx_decoder import Decoder, Sizes
from jax_fp8gemm import nnx as fp8_nnx

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")

TINY = Sizes(
    *("tiny", 2),
    **dict(hidden=128, inter=256, heads=4, kv_heads=2, head_dim=32, vocabulary=384),
    **dict(sequences=2, length=64),
)
FP8 = model.in_linear(jax_fp8gemm.DEEPSEEK_V3)
WITH_HEAD = model.everywhere(jax_fp8gemm.DEEPSEEK_V3)
SQUARE = model.everywhere(model.SQUARE)


def test_flop_of_a_model():
    # By hand: q and o 128 x 128, k and v 128 x 64, three of 128 x 256; 64 tokens see 32 others.
    of_layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    attention = 2 * 3 * 2 * 2 * 32 * 128
    assert TINY.flop == 128 * (6 * (2 * of_layer + 128 * 384) + attention)
    sizes = model.LLAMA3_8B
    assert sizes.tokens == 8192
    # As many as four layers of Llama-3-8B have: 218 M each.
    assert sizes.weights_of_products - 4096 * 32768 == 4 * 218_103_808


@contextlib.contextmanager
def promotion():
    """What Flax's modules and jax.nn's attention on the CPU rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _text(prepare=None, **how):
    """The text of the gradient for a GPU, without running it."""
    tokens = jax.ShapeDtypeStruct((2, 65), np.int32)
    with promotion():
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(TINY, nnx.Rngs(0), **how)))
        loss = functools.partial(model._loss, graph, prepare)
        traced = jax.jit(jax.grad(loss)).trace(nnx.to_pure_dict(state), tokens)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "how, products, of_swiglu",
    [
        ({}, 0, 0),
        (FP8, 3 * 7 * 2, 0),
        (WITH_HEAD, 3 * 4 * 2 + 3 * 2 * 2 + 3, 2),
        (SQUARE, 3 * 4 * 2 + 3 * 2 * 2 + 3, 2),
    ],
    ids=["bf16", "linear", "head_swiglu", "square"],
)
def test_which_products_are_ours(how, products, of_swiglu):
    # Forward, and the gradients of both operands: seven Linear in each of two layers.
    text = _text(**how)
    calls = text.count("custom_call @jax_fp8gemm_gemm(")
    assert calls == products
    assert text.count("custom_call @jax_fp8gemm_swiglu_grad_quantize(") == of_swiglu


def test_a_model_trains_as_in_bf16():
    with promotion():
        calls = [model.model_call(TINY, [], **how) for how in ({}, FP8, WITH_HEAD, SQUARE)]
    losses = np.array([[float(call.run()) for _ in range(4)] for call in calls])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)
    # SwiGLU draws gate and up at once, so its initial values are others.
    np.testing.assert_allclose(losses[2:], losses[[0, 0]], rtol=0.05)
    assert (np.diff(losses) < 0).all()
    assert all(call.peak_bytes is not None and call.kernel == "" for call in calls)


def test_layers_in_a_scan():
    """They train as layers one after another do; weights that are quantised once change no bit."""
    once = dict(prepare=fp8_nnx.quantize_weights, **model.ours(jax_fp8gemm.DEEPSEEK_V3))
    scanned = dict(is_scanned=True)
    with promotion():
        calls = [
            model.model_call(TINY, [], **how)
            for how in (FP8, FP8 | scanned, once | scanned, scanned)
        ]
    unrolled, in_scan, quantised_once, bf16 = (
        np.array([float(call.run()) for _ in range(4)]) for call in calls
    )
    np.testing.assert_array_equal(quantised_once, in_scan)
    # The layers' initial values are others.
    np.testing.assert_allclose(in_scan, unrolled, rtol=0.05)
    np.testing.assert_allclose(in_scan, bf16, rtol=0.01)
    assert (np.diff(in_scan) < 0).all() and not np.array_equal(in_scan, bf16)


def test_weights_are_quantised_once_outside_the_scan():
    # Seven Linear in the body of a scan; in the backward body they run again.
    by_linear = _text(**FP8, is_scanned=True)
    once = _text(fp8_nnx.quantize_weights, **model.ours(jax_fp8gemm.DEEPSEEK_V3), is_scanned=True)
    squares = lambda text: len(re.findall(r"@jax_fp8gemm_quantize\(.*? mode = [345] ", text))
    assert (squares(by_linear), squares(once)) == (2 * 7, 7)
    products = lambda text: text.count("custom_call @jax_fp8gemm_gemm(")
    assert products(once) == products(by_linear) > 3 * 7


def test_models_of_the_same_parameters_share_their_state():
    states = []
    with promotion():
        calls = [model.model_call(TINY, states, **how) for how in ({}, FP8)]
        losses = [float(calls[i].run()) for i in (0, 1, 0, 1)]
    assert len(states) == 1 and (np.diff(losses) < 0).all()


def test_peers_of_a_model():
    case, scanned = model.model_cases(dataclasses.replace(TINY, layers=1))
    peers = ["square_wgrad", "fp8_head_swiglu", "fp8_head_swiglu_square", "xla_bf16"]
    assert list(case.peers) == peers
    assert case.labels["tokens"] == 128
    assert list(scanned.peers) == ["quantised_once", "xla_bf16"]
    assert scanned.labels == case.labels | dict(name="tiny_scanned")
