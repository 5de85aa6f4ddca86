"""The kernels of padded quantisers against NumPy, and products of what they return."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import padded_cases
import pytest
import reference
from gpu_cases import E4M3, E5M2

import jax_fp8gemm as jf

pytestmark = pytest.mark.gpu
modes = pytest.mark.parametrize("mode", padded_cases.MODES)
HOW = dict(dtype=E4M3, pow2_scale=False, implementation=gpu_cases.IMPLEMENTATION)


@modes
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("fmt, pow2", [(E4M3, False), (E5M2, True)])
def test_bits(mode, dtype, fmt, pow2):
    for shape in padded_cases.SHAPES:
        x = padded_cases.with_special_blocks(shape, dtype)
        padded_cases.assert_padded(x, mode, gpu_cases.IMPLEMENTATION, fmt=fmt, pow2=pow2)


@modes
def test_all_of_a_buffer_is_overwritten(mode):
    """Values go to donated buffers of 0xFF bytes. Their padding must be zeros too."""
    x = np.random.default_rng(0).standard_normal((200, 333), np.float32)
    run = lambda poison, x: [
        y for y in padded_cases.quantized(x, mode, **HOW) if y.dtype.itemsize == 1
    ]
    types = jax.eval_shape(lambda x: run(None, x), jnp.asarray(x))
    fill = lambda t: jax.lax.bitcast_convert_type(jnp.full(t.shape, 0xFF, jnp.uint8), t.dtype)
    poison = [fill(t) for t in types]
    addresses = {p.unsafe_buffer_pointer() for p in poison}
    found = jax.jit(run, donate_argnums=0, keep_unused=True)(poison, jnp.asarray(x))
    assert {y.unsafe_buffer_pointer() for y in found} == addresses
    wanted = padded_cases.expected(x, mode, fmt=E4M3, pow2=False)
    wanted = [y for y in wanted if y.dtype.itemsize == 1]
    for actual, values in zip(found, wanted, strict=True):
        reference.assert_same_bits(actual, values)


@modes
@pytest.mark.parametrize("rows", [128, 72])
def test_elements_of_a_batch_are_those_of_single_calls(mode, rows):
    padded_cases.assert_batches_are_independent(mode, rows, gpu_cases.IMPLEMENTATION)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["array", "quantised"])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=["rows", "squares"])
@pytest.mark.parametrize(
    "m, k, n", [(201, 4496, 6928), (1000, 5000, 5001), (7, 2880, 2112), (65, 1003, 129), (3, 5, 7)]
)
def test_products_have_the_bits_of_operands_without_padding(m, k, n, block, is_quantised):
    """block: of x in the weight gradient. is_quantised: whether w was quantised before."""
    recipe = jf.Recipe(wgrad_lhs_block=block)
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    x, w, dout = draw(0, m, k), draw(1, k, n), draw(2, m, n)
    how = dict(implementation=gpu_cases.IMPLEMENTATION)

    @jax.jit
    def padded(x, w, dout):
        weight = jf.quantize_weight(w, recipe=recipe, **how) if is_quantised else w
        out, vjp = jax.vjp(functools.partial(jf.matmul, recipe=recipe, **how), x, weight)
        dx, dw = vjp(dout)
        return out, dx, jf.master_weights(dw)

    unpadded = jax.jit(functools.partial(padded_cases.unpadded_products, column_block=block, **how))
    for actual, wanted in zip(padded(x, w, dout), unpadded(x, w, dout), strict=True):
        gpu_cases.assert_same(actual, wanted)
