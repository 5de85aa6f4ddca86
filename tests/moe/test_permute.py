"""permute and unpermute against a loop over rows, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises

from jax_fp8gemm.moe import permute, unpermute

M, D, E = 50, 12, 7


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def chosen(top_k, seed=0, low=0, high=E):
    """Experts of M tokens, distinct where low..high-1 are enough of them."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.normal(size=(M, high - low)))[:, :top_k].astype(np.int32) + low


INDICES = {
    "top 1": chosen(1),
    "top 2": chosen(2),
    "all": chosen(E),
    "one expert for all": np.full((M, 1), 3, np.int32),
    "the same twice": np.tile(chosen(1), 2),
    "empty first and last": chosen(2, low=2, high=5),
    "no expert at times": chosen(3, low=-2, high=E + 2),
    "no expert ever": np.full((M, 2), E, np.int32),
}
indices_cases = pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES.keys())


def operands(indices, dtype=jnp.float32):
    return jnp.asarray(normal(M, D), dtype), jnp.asarray(indices)


@indices_cases
def test_rows_are_sorted_by_expert_and_then_by_token(indices):
    x, _ = operands(indices)
    rows, group_sizes, order = jax.jit(permute, static_argnums=2)(x, jnp.asarray(indices), E)
    expected, position = [], {}
    for expert in [*range(E), None]:
        for i, j in np.ndindex(*indices.shape):
            if (indices[i, j] if 0 <= indices[i, j] < E else None) == expert:
                position[i, j] = len(expected)
                expected.append(np.asarray(x)[i])
    np.testing.assert_array_equal(rows, np.stack(expected))
    sizes = [np.sum(indices == expert) for expert in range(E)]
    np.testing.assert_array_equal(group_sizes, sizes)
    assert all(order[i, j] == position[i, j] for i, j in np.ndindex(*indices.shape))
    assert group_sizes.dtype == order.dtype == jnp.int32


@indices_cases
def test_unpermute_is_the_weighted_sum_in_order(indices):
    x, _ = operands(indices)
    weights = normal(*indices.shape, seed=1)
    rows, _, order = permute(x, jnp.asarray(indices), E)
    rows = np.asarray(rows) * normal(len(rows), 1, seed=2)  # each copy a row of its own
    out = unpermute(jnp.asarray(rows), order, jnp.asarray(weights))
    expected = (rows.astype(np.float64)[np.asarray(order)] * weights[..., None]).sum(axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_unpermute_rounds_once(dtype):
    # Sums of integers below 256 are exact in f32, and 2^-12 of one is not in bf16 or f16.
    rng = np.random.default_rng(0)
    rows = rng.integers(-8, 9, (2 * M, D)).astype(dtype)
    weights = (1 + rng.integers(0, 2, (M, 2)) * 2.0**-12).astype(np.float32)
    order = rng.permutation(2 * M).reshape(M, 2).astype(np.int32)
    out = unpermute(*map(jnp.asarray, (rows, order, weights)))
    exact = (rows.astype(np.float64)[order] * weights[..., None]).sum(axis=1)
    reference.assert_same_bits(out, exact.astype(dtype))


def both(x, indices, weights):
    """x permuted, changed row by row, and unpermuted."""
    rows, _, order = permute(x, indices, E)
    return unpermute(jnp.sin(rows) * rows[:1], order, weights)


@indices_cases
def test_gradients_are_those_of_plain_indexing(indices):
    x, indices = operands(indices)
    weights, dout = jnp.asarray(normal(*indices.shape, seed=1)), jnp.asarray(normal(M, D, seed=2))

    def plain(x, weights):
        is_expert = (indices >= 0) & (indices < E)
        first = jnp.argsort(jnp.where(is_expert, indices, E).reshape(-1))[0] // indices.shape[1]
        return (jnp.sin(x)[:, None] * x[first][None, None] * weights[:, :, None]).sum(axis=1)

    found = jax.jit(lambda *z: jax.vjp(lambda x, w: both(x, indices, w), *z)[1](dout))(x, weights)
    for actual, expected in zip(found, jax.vjp(plain, x, weights)[1](dout), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_dtypes_of_their_operands(dtype):
    x, indices = operands(INDICES["top 2"], dtype)
    weights = jnp.asarray(normal(M, 2, seed=1), dtype)
    loss = lambda x, weights: both(x, indices, weights).astype(jnp.float32).sum()
    dx, dweights = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    assert (dx.dtype, dweights.dtype) == (dtype, dtype)


def test_no_value_meets_a_scatter_add():
    x, indices = operands(INDICES["top 2"])
    weights = jnp.asarray(normal(M, 2, seed=1))

    def loss(x, weights):
        rows, _, order = permute(x, indices, E)
        return unpermute(rows, order, weights).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights))
    assert "gather" in text and "scatter-add" not in text and "scatter_add" not in text
    # What is scattered is the inverse of a permutation, of int32.
    assert all("i32" in line for line in text.splitlines() if "= scatter[" in line)


def test_runs_are_bitwise_equal():
    x, indices = operands(INDICES["all"])
    weights = jnp.asarray(normal(*indices.shape, seed=1))
    gradients = jax.jit(jax.grad(lambda *z: both(z[0], indices, z[1]).sum(), (0, 1)))
    for first, second in zip(gradients(x, weights), gradients(x, weights), strict=True):
        reference.assert_same_bits(first, second)


def test_vmap():
    x, weights = jnp.asarray(normal(3, M, D)), jnp.asarray(normal(3, M, 2, seed=1))
    indices = jnp.stack([jnp.asarray(chosen(2, seed)) for seed in range(3)])
    loss = lambda x, indices, weights: both(x, indices, weights).sum()
    gradients = jax.grad(loss, (0, 2))
    mapped = jax.jit(jax.vmap(gradients))(x, indices, weights)
    for i in range(3):
        one = jax.jit(gradients)(x[i], indices[i], weights[i])
        for actual, expected in zip(mapped, one, strict=True):
            np.testing.assert_allclose(actual[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32])
def test_any_integer_dtype(dtype):
    x, indices = operands(INDICES["top 2"])
    rows, group_sizes, order = permute(x, indices.astype(dtype), 300)
    expected = permute(x, indices, 300)
    for found, y in zip((rows, group_sizes, order), expected, strict=True):
        reference.assert_same_bits(found, y)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_numbers_beyond_int32_are_no_expert(dtype, x64):
    wide = INDICES["top 2"].astype(dtype)
    # Wrapped to 32 bits, or to their signed kin, they would be experts 0 to 6 or -1.
    wide[3], wide[5, 1] = wide[3] + dtype(2**32 if dtype != np.uint32 else 2**31), dtype(2**32 - 1)
    x, indices = operands(np.where(wide < E, wide, E).astype(np.int32))
    with jax.enable_x64(x64):
        found = permute(x, jnp.asarray(wide) if x64 else wide, E)
    for y, expected in zip(found, permute(x, indices, E), strict=True):
        reference.assert_same_bits(y, expected)


def test_no_tokens():
    x, indices = jnp.zeros((0, D)), jnp.zeros((0, 2), jnp.int32)
    rows, group_sizes, order = permute(x, indices, E)
    assert rows.shape == (0, D) and not group_sizes.any()
    assert unpermute(rows, order, jnp.zeros((0, 2))).shape == (0, D)


X, TOP = jnp.ones((4, 3)), jnp.zeros((4, 2), jnp.int32)


@pytest.mark.parametrize(
    "function, args, error, message",
    [
        (
            permute,
            (X, TOP.astype(jnp.float32), 2),
            TypeError,
            r"integers; got .* f32\[4,2\]",
        ),
        (
            permute,
            (X, TOP[1:], 2),
            ValueError,
            r"must be \(m, top_k\).*got indices s32\[3,2\], x f",
        ),
        (permute, (X, TOP[:, :0], 2), ValueError, "top_k >= 1"),
        (permute, (X, TOP[:, 0], 2), ValueError, r"indices s32\[4\]"),
        (permute, (X[0], TOP, 2), ValueError, r"x must be \(m, d\); got x f32\[3\]"),
        (permute, ([1], TOP, 2), TypeError, "x must be an array; got list"),
        (unpermute, (X, TOP, TOP), TypeError, "weights must be bf16, f16 or f32"),
        (
            unpermute,
            (X, TOP[:2], X),
            ValueError,
            r"must be \(m, top_k\) for rows \(m \* top_k, d\)",
        ),
        (
            unpermute,
            (X, TOP, X[:, :2]),
            ValueError,
            r"order s32\[4,2\], weights f32\[4,2\], rows f32",
        ),
        (unpermute, (X, TOP.astype(jnp.uint32), X), TypeError, "order must be s32; got order u32"),
    ],
)
def test_bad_operands_raise(function, args, error, message):
    with raises(error, match=f"{function.__name__}: .*{message}"):
        function(*args)


def test_bad_num_experts_raises():
    for number in (0, 2.0, "2"):
        with raises(
            ValueError, match=f"permute: num_experts must be an integer, at least 1; got {number!r}"
        ):
            permute(X, TOP, number)
    with raises(TypeError, match="permute: num_experts must be static; got a traced s32"):
        jax.jit(permute)(X, TOP, 2)
