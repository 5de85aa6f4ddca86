"""matmul on the kernels: forward and gradients against the fake-quantised float64 reference."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import GPU_PRODUCT
from gpu_cases import E5M2, SQUARE

import jax_fp8gemm as jf

pytestmark = pytest.mark.gpu

RECIPES = {
    "deepseek_v3": (jf.DEEPSEEK_V3, {}),
    "hybrid": (jf.HYBRID, dict(bwd=E5M2)),
    "pow2": (jf.Recipe(pow2_scale=True), dict(pow2=True)),
    "e5m2": (jf.Recipe(fwd="e5m2", bwd="e5m2"), dict(fwd=E5M2, bwd=E5M2)),
    "bf16_wgrad": (jf.Recipe(wgrad="bf16"), dict(fp8_drhs=False)),
}


def matmul(lhs, rhs):
    """jf.matmul on the kernels."""
    return jf.matmul(lhs, rhs, implementation=gpu_cases.IMPLEMENTATION)


def _data(seed, m, k, n, dtype):
    rng = np.random.default_rng(seed)
    shapes = ((m, k), (k, n), (m, n))
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def _fwd_and_grads(lhs, rhs, dout, recipe=jf.DEEPSEEK_V3, implementation=None):
    implementation = implementation or gpu_cases.IMPLEMENTATION
    run = functools.partial(jf.matmul, recipe=recipe, implementation=implementation)
    out, pullback = jax.vjp(run, lhs, rhs)
    return out, *pullback(dout)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", GPU_PRODUCT)
@pytest.mark.parametrize("mkn", [(256, 384, 512), (200, 136, 328), (65, 129, 1003)], ids=str)
def test_forward_and_gradients(name, dtype, mkn):
    recipe, options = RECIPES[name]
    lhs, rhs, dout = _data(0, *mkn, dtype)
    actual = jax.jit(functools.partial(_fwd_and_grads, recipe=recipe))(lhs, rhs, dout)
    expected = reference.matmul_vjp(lhs, rhs, dout, **options)
    exact = [x.astype(np.float64) for x in (lhs, rhs, dout)]
    plain = (exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2])
    for result, truth, product in zip(actual, expected, plain, strict=True):
        assert result.dtype == dtype
        assert reference.calc_diff(result, truth) < GPU_PRODUCT[dtype]
        assert reference.calc_diff(result, product) < (4e-3 if "e5m2" in str(options) else 1e-3)


def test_gradient_of_small_tokens_uses_f32_accumulation():
    """One token beside 4095 zero rows: the gradient of rhs is their outer product."""
    lhs, rhs, dout = _data(1, 4096, 256, 256, jnp.float32)
    lhs[1:] = dout[1:] = 0
    _, _, drhs = jax.jit(_fwd_and_grads)(lhs, rhs, dout)
    expected = reference.matmul_vjp(lhs, rhs, dout)[2]
    assert reference.calc_diff(drhs, expected) < GPU_PRODUCT[jnp.float32]


def test_large_products_agree_with_the_reference_lowering():
    """Llama-3-8B's gate and up projection at 2048 tokens, every element, on the device."""
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = ((2048, 4096), (4096, 14336), (2048, 14336))
    operands = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    kernel = jax.jit(_fwd_and_grads)(*operands)
    plain = jax.jit(
        functools.partial(_fwd_and_grads, implementation="xla"),
        compiler_options=gpu_cases.COMPILER_OPTIONS,
    )(*operands)
    for actual, expected in zip(kernel, plain, strict=True):
        x, y = actual.astype(jnp.float32), expected.astype(jnp.float32)
        assert float(jnp.sum((x - y) ** 2) / (jnp.sum(x**2) + jnp.sum(y**2))) < 1e-5
        assert float(jnp.max(jnp.abs(x - y))) < 0.02 * float(jnp.max(jnp.abs(y)))


def test_the_kernels_run_all_three_products():
    lhs, rhs, dout = _data(3, 256, 256, 256, jnp.bfloat16)
    text = jax.jit(_fwd_and_grads).lower(lhs, rhs, dout).as_text()
    assert text.count("custom_call @jax_fp8gemm_gemm") == 3
    assert "dot_general" not in text


def test_a_scan_runs_each_product_once():
    """Whose result is read by the layer and kept for its backward pass."""
    layer = lambda x, w: (jnp.sin(matmul(x, w)), None)
    loss = lambda x, weights: jnp.sum(jax.lax.scan(layer, x, weights)[0], dtype=jnp.float32)
    operands = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((4, 256, 256), jnp.bfloat16)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*operands).compile()
    assert compiled.as_text().count('custom_call_target="jax_fp8gemm_gemm"') == 3


@pytest.mark.parametrize("with_transpose", [False, True])
def test_weights_quantised_once_give_the_same_bits(with_transpose):
    lhs, rhs, dout = _data(4, 200, 256, 384, jnp.bfloat16)
    quantize = functools.partial(jf.quantize, block=SQUARE, implementation=gpu_cases.IMPLEMENTATION)
    weights = quantize(jnp.asarray(rhs), with_transpose=with_transpose)
    out, pullback = jax.vjp(lambda lhs: matmul(lhs, weights), jnp.asarray(lhs))
    expected = jax.jit(_fwd_and_grads)(lhs, rhs, dout)
    gpu_cases.assert_same(out, expected[0])
    gpu_cases.assert_same(pullback(jnp.asarray(dout))[0], expected[1])


def test_leading_dimensions_fold_into_rows():
    lhs, rhs, _ = _data(5, 6 * 40, 256, 128, jnp.bfloat16)
    folded = matmul(jnp.asarray(lhs), jnp.asarray(rhs))
    out = matmul(jnp.asarray(lhs).reshape(2, 3, 40, 256), jnp.asarray(rhs))
    gpu_cases.assert_same(out.reshape(240, 128), folded)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, 0), (None, 0, 0)], ids=str)
def test_vmap_of_gradients_gives_the_bits_of_single_calls(in_axes):
    many = [_data(10 + i, 130, 256, 136, jnp.bfloat16) for i in range(3)]
    stacked = [jnp.stack([jnp.asarray(one[i]) for one in many]) for i in range(3)]
    args = [x if axis == 0 else x[0] for x, axis in zip(stacked, in_axes, strict=True)]
    together = jax.jit(jax.vmap(_fwd_and_grads, in_axes=in_axes))(*args)
    for i in range(3):
        one = [x[i] if axis == 0 else x for x, axis in zip(args, in_axes, strict=True)]
        for batched, single in zip(together, jax.jit(_fwd_and_grads)(*one), strict=True):
            gpu_cases.assert_same(batched[i], single)


def test_transformations_do_not_change_the_bits():
    """Eager, jit, remat and 20 runs."""
    args = [jnp.asarray(x) for x in _data(6, 200, 384, 264, jnp.bfloat16)]
    expected = jax.jit(_fwd_and_grads)(*args)

    def rematerialised(lhs, rhs, dout):
        out, pullback = jax.vjp(jax.checkpoint(matmul), lhs, rhs)
        return out, *pullback(dout)

    runs = [_fwd_and_grads(*args), jax.jit(rematerialised)(*args)]
    runs += [jax.jit(_fwd_and_grads)(*args) for _ in range(20)]
    for results in runs:
        for actual, wanted in zip(results, expected, strict=True):
            gpu_cases.assert_same(actual, wanted)


def test_donated_operands():
    lhs, rhs, dout = (jnp.asarray(x) for x in _data(7, 256, 256, 256, jnp.bfloat16))
    expected = jax.jit(_fwd_and_grads)(lhs, rhs, dout)
    donated = jax.jit(_fwd_and_grads, donate_argnums=(0, 1, 2))(lhs, rhs, dout)
    for actual, wanted in zip(donated, expected, strict=True):
        gpu_cases.assert_same(actual, wanted)


def test_fallback_rounds_to_fp8_under_jit():
    """matmul with implementation="xla": the error of FP8, not that of bf16."""
    lhs, rhs, dout = _data(8, 256, 512, 384, jnp.float32)
    plain = jax.jit(functools.partial(_fwd_and_grads, implementation="xla"))(lhs, rhs, dout)
    for result, truth in zip(plain, reference.matmul_vjp(lhs, rhs, dout), strict=True):
        assert reference.calc_diff(result, truth) < 1e-7
    exact = lhs.astype(np.float64) @ rhs
    assert 3e-4 < reference.calc_diff(plain[0], exact) < 1e-3


def test_exact_integers():
    """7 = 448 / 64 in every scale block: quantisation loses nothing and neither do the sums."""
    rng = np.random.default_rng(9)
    sizes = ((256, 128), (128, 256), (256, 256))
    lhs, rhs, dout = (rng.integers(-7, 8, size).astype(np.float32) for size in sizes)
    for x in (lhs, rhs, dout):
        x[::128, :] = x[:, ::128] = 7
    out, dlhs, drhs = jax.jit(_fwd_and_grads)(lhs, rhs, dout)
    np.testing.assert_array_equal(out, lhs @ rhs)
    np.testing.assert_array_equal(dlhs, dout @ rhs.T)
    np.testing.assert_array_equal(drhs, lhs.T @ dout)
