"""What a ScaledArray has in common with an array: size, indices, stack, concatenate, astype, @."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises

from jax_fp8gemm import ScaledArray, concatenate, dequantize, matmul, quantize, stack

SQUARE = (128, 128)
HOW = [
    dict(),
    *(dict(block=SQUARE, with_transpose=how) for how in (False, True, "only")),
]
every_kind = pytest.mark.parametrize("how", HOW, ids=["rows", "values", "both", "transposed"])


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(reference.assert_same_bits, found, expected)


@every_kind
def test_size_and_bytes(how):
    q = quantize(random(3, 256, 384), **how)
    scales = 256 * 3 if q.block == (1, 128) else 2 * 3
    copies = 2 if how.get("with_transpose") is True else 1
    assert (q.size, q.nbytes) == (3 * 256 * 384, 3 * (copies * 256 * 384 + 4 * scales))


@every_kind
def test_leading_dimensions_are_indexed(how):
    x = random(4, 3, 130, 140)
    q = quantize(x, **how)
    for index in (1, -1, (2, 0), slice(1, 3), (slice(None), 1), np.asarray([3, 0]), None):
        assert_same(q[index], quantize(x[index], **how))
    assert_same(jax.jit(lambda q, i: q[i])(q, 2), quantize(x[2], **how))
    assert q[...] is q
    assert len(list(q)) == 4
    assert_same(list(q)[3], quantize(x[3], **how))


@pytest.mark.parametrize("index", [(0, 0), (...,), (..., 0), (0, slice(2))], ids=str)
def test_values_are_not_indexed(index):
    q = quantize(random(2, 4, 130), block=SQUARE)
    with raises(IndexError, match=r"ScaledArray: only dimensions before the last two .*\[2,4,130"):
        q[index]
    with raises(TypeError, match=r"ScaledArray: only an array with leading dim.*f8e4m3fn\[4,130\]"):
        list(q[0])


@every_kind
@pytest.mark.parametrize("axis", [0, 1, -3])
def test_stack(how, axis):
    xs = [random(2, 130, 140, seed=seed) for seed in range(3)]
    found = stack([quantize(x, **how) for x in xs], axis)
    assert_same(found, quantize(jnp.stack(xs, axis), **how))


@every_kind
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_concatenate(how, axis):
    extents = [2, 256, 128]
    xs = []
    for seed in range(2):
        shape = list(extents)
        # The last may end within a block.
        shape[axis] += 5 * seed
        xs.append(random(*shape, seed=seed))
    found = concatenate([quantize(x, **how) for x in xs], axis)
    assert_same(found, quantize(jnp.concatenate(xs, axis), **how))


def test_what_is_stored_of_a_mixture():
    xs = [random(130, 140, seed=seed) for seed in range(3)]
    kinds = [quantize(x, **how) for x, how in zip(xs, HOW[1:], strict=True)]
    both, only = kinds[1], kinds[2]
    assert_same(stack([both, only]), quantize(jnp.stack(xs[1:]), **HOW[3]))
    assert_same(stack(kinds), quantize(jnp.stack(xs), **HOW[1]))


def test_astype():
    q = quantize(random(4, 256))
    assert q.astype(jnp.float8_e4m3fn) is q
    reference.assert_same_bits(q.astype(jnp.bfloat16), dequantize(q, jnp.bfloat16))
    with raises(TypeError, match="astype: dtype must be f8e4m3fn, .* f8e5m2. Another FP8"):
        q.astype(jnp.float8_e5m2)
    with raises(TypeError, match="dequantize: dtype must be bf16, f16 or f32; got s32"):
        q.astype(jnp.int32)


def test_matmul_operator():
    x, w = random(4, 256), quantize(random(256, 130), block=SQUARE, with_transpose="only")
    expected = matmul(x, w)
    reference.assert_same_bits(x @ w, expected)
    reference.assert_same_bits(np.asarray(x) @ w, expected)
    np.testing.assert_allclose(jax.jit(lambda x, w: x @ w)(x, w), expected, rtol=1e-6, atol=1e-6)
    with raises(TypeError, match="lhs must be an array; got a ScaledArray"):
        w @ x


def test_from_reciprocal_scale():
    q = quantize(random(4, 256), pow2_scale=True)
    assert_same(ScaledArray.from_reciprocal_scale(q.values, 1 / q.scale), q)


def test_a_transposed_operand_is_hinted_at():
    x, w = random(4, 256), quantize(random(130, 256), block=SQUARE)
    with raises(TypeError, match=r"must share k; got k=256 .*, k=130 in rhs .*. rhs.T has k=256.$"):
        matmul(x, w)
    with raises(TypeError, match=r"rhs.mT has k=256.$"):
        matmul(x, random(2, 130, 256))
    with raises(TypeError, match=r"k=130 in rhs f32\[130,140\]$"):
        matmul(x, random(130, 140))


A, B = (quantize(random(100, 256, seed=seed), block=SQUARE) for seed in range(2))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: stack([A, A.values]), TypeError, r"stack: arrays\[1\] must be a ScaledArray"),
        (lambda: stack(A), TypeError, "stack: arrays must be a sequence of ScaledArrays"),
        (lambda: concatenate([]), TypeError, r"concatenate: arrays must be a sequence .*\[\]"),
        (lambda: stack([A, A.T]), ValueError, "stack: arrays must have one shape"),
        (lambda: stack([A, B], 1), ValueError, "axis must lie before the last two .*got 1"),
        (lambda: stack([A, B], -1), ValueError, "axis must lie before the last two .*got -1"),
        (lambda: stack([A, B], "x"), ValueError, r"stack: axis must be in -3..2; got 'x'"),
        (lambda: concatenate([A, B], 2), ValueError, r"concatenate: axis must be in -2..1; got 2"),
        (lambda: concatenate([A, B]), ValueError, "whole scale blocks, multiples of 128, along"),
        (lambda: concatenate([A, A.T]), ValueError, "one shape but for dimension 0"),
        (
            lambda: concatenate([A, quantize(random(100, 256))]),
            ValueError,
            r"one dtype, one rank and one block; .* with blocks \(1, 128\), \(128, 128\)",
        ),
    ],
)
def test_bad_input_ends_in_a_sentence(call, error, message):
    with raises(error, match=message):
        call()
