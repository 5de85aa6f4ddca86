import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises

from jax_fp8gemm import ScaledArray, dequantize, quantize, quantize_weight

SQUARE = (128, 128)


@functools.cache
def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("block", [(1, 128), SQUARE])
@pytest.mark.parametrize("shape", [(130, 257), (2, 3, 129, 128)])
def test_dequantize_is_value_times_scale(shape, block):
    q = quantize(jnp.asarray(random(shape)), block=block)
    expected = reference.dequantize(q.values, q.scale, block).astype(np.float32)
    np.testing.assert_array_equal(q.dequantize(), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantize_rounds_once_to_the_dtype(dtype):
    q = quantize(jnp.asarray(random((8, 200))))
    expected = reference.dequantize(q.values, q.scale, q.block).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(dequantize(q, dtype), expected)


def test_shape_dtype_ndim_are_those_of_the_values():
    q = quantize(jnp.asarray(random((130, 257))), dtype=jnp.float8_e5m2)
    assert (q.shape, q.dtype, q.ndim) == ((130, 257), jnp.float8_e5m2, 2)
    assert repr(q) == "ScaledArray(values=f8e5m2[130,257], scale=f32[130,3], block=(1, 128))"
    turned = quantize(jnp.asarray(random((130, 257))), block=SQUARE).T
    stored = "transposed=f8e4m3fn[130,257], scale=f32[2,3]"
    assert repr(turned) == f"ScaledArray({stored}, block=(128, 128))"
    assert (turned.shape, turned.dtype, turned.ndim) == ((257, 130), jnp.float8_e4m3fn, 2)


def test_html_lists_what_is_stored():
    q = ScaledArray(jnp.zeros((130, 257), jnp.float8_e5m2), jnp.ones((130, 3)))
    assert q._repr_html_() == (
        "<table><caption>ScaledArray, block (1, 128)</caption>"
        "<tr><th>values</th><td>f8e5m2[130,257]</td><td>33,410 bytes</td></tr>"
        "<tr><th>scale</th><td>f32[130,3]</td><td>1,560 bytes</td></tr></table>"
    )
    # A pytree may hold anything.
    odd = ScaledArray(None, "<b>", jax.ShapeDtypeStruct((2, 3), q.dtype), SQUARE)._repr_html_()
    assert "<tr><th>transposed</th><td>f8e5m2[2,3]</td><td></td></tr>" in odd
    assert "<tr><th>scale</th><td>str</td><td></td></tr>" in odd


@pytest.mark.parametrize("with_transpose", [False, True, "only"])
def test_transpose_of_square_blocks_is_exact(with_transpose):
    x = random((2, 130, 257))
    q = quantize(jnp.asarray(x), block=SQUARE, with_transpose=with_transpose)
    assert (q.T.block, q.T.shape, q.T.ndim, q.T.dtype) == (SQUARE, (2, 257, 130), 3, q.dtype)
    # Either orientation, of q and of its transpose, holds what quantising that orientation gives.
    for stored, truth in ((q, x), (q.T, x.mT)):
        values, scale = reference.quantize(truth, SQUARE)
        exact = reference.dequantize(values, scale, SQUARE).astype(np.float32)
        np.testing.assert_array_equal(stored.dequantize(), exact)
        if stored.values is not None:
            reference.assert_same_bits(stored.values, values)
            reference.assert_same_bits(stored.scale, scale)
        if stored.transposed is not None:
            reference.assert_same_bits(stored.transposed, values.mT)
    assert (q.values is None) == (with_transpose == "only")
    assert (q.transposed is None) == (with_transpose is False)


@pytest.mark.parametrize("with_transpose", [False, "only"])
def test_transpose_of_one_stored_orientation_moves_nothing(with_transpose):
    q = quantize(jnp.asarray(random((130, 257))), block=SQUARE, with_transpose=with_transpose)
    assert q.T.values is q.transposed and q.T.transposed is q.values and q.T.scale is q.scale


def test_transpose_of_row_blocks_raises():
    with raises(ValueError, match=r"ScaledArray.T: block must be \(128, 128\).*axis=-2"):
        quantize(jnp.ones((4, 4))).T  # noqa: B018


def test_is_a_pytree_with_a_static_block():
    q = quantize(jnp.asarray(random((128, 128))), block=SQUARE)
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).block == SQUARE
    shapes = jax.eval_shape(lambda q: q, q)
    assert isinstance(shapes, ScaledArray) and shapes.shape == (128, 128)


def test_passes_through_jit_vmap_and_scan():
    q = quantize(jnp.asarray(random((3, 4, 256))))
    expected = q.dequantize()
    np.testing.assert_array_equal(jax.jit(dequantize)(q), expected)
    np.testing.assert_array_equal(jax.vmap(dequantize)(q), expected)
    _, scanned = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, q)
    np.testing.assert_array_equal(scanned, expected)


@pytest.mark.parametrize("with_transpose", [False, True, "only"])
def test_exported_functions_take_and_return_it(with_transpose):
    q = quantize(jnp.asarray(random((130, 257))), block=SQUARE, with_transpose=with_transpose)
    function = jax.jit(lambda q: (q.T, quantize(q.dequantize())))
    exported = jax.export.export(function)(q)
    again = jax.export.deserialize(exported.serialize())
    found, expected = again.call(q), function(q)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert (found[0].block, found[1].block) == (SQUARE, (1, 128))
    jax.tree.map(reference.assert_same_bits, found, expected)


def test_rounding_survives_a_jit_that_dequantises():
    # The trap is XLA's on GPU; here the test holds the CPU to the same.
    x = jnp.asarray(random((4, 256)))
    expected = reference.fake_quantize(x).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: quantize(x).dequantize())(x), expected)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda v, s: v, TypeError, r"x must be a ScaledArray; got f8e4m3fn\[4,256\]"),
        (
            lambda v, s: ScaledArray(v, s[:, :1]),
            ValueError,
            r"x_scale must be f32\[4,2\] \(one scale per 1x128 block .*; got f32\[4,1\]",
        ),
        (
            lambda v, s: ScaledArray(v, s, None, (1, 64)),
            ValueError,
            r"x.block must be \(1, 128\) or \(128, 128\); got \(1, 64\)",
        ),
        (
            lambda v, s: ScaledArray(v.astype(jnp.float32), s),
            TypeError,
            r"x must be f8e4m3fn or f8e5m2; got x f32\[4,256\]",
        ),
        (
            lambda v, s: ScaledArray(v, s, v.T),
            ValueError,
            r"x.transposed must be None, or f8e4m3fn\[256,4\] with block \(128, 128\)",
        ),
        (lambda v, s: ScaledArray(None, s), TypeError, "x.values must be an array; got NoneType"),
        (
            lambda v, s: ScaledArray(None, s, v),
            ValueError,
            r"x.transposed must be None, .*; got f8e4m3fn\[4,256\] with block \(1, 128\)",
        ),
        (
            lambda v, s: ScaledArray(None, s, v, SQUARE),
            ValueError,
            r"x.transposed_scale must be f32\[1,2\] .* of x.transposed f8e4m3fn\[4,256\]",
        ),
    ],
)
def test_broken_invariants_are_told_where_used(make, error, message):
    q = quantize(jnp.asarray(random((4, 256))))
    with raises(error, match="dequantize: " + message):
        dequantize(make(q.values, q.scale))


@pytest.mark.parametrize("shape", [(129, 257), (2, 256, 64)])
def test_a_scale_of_squares_without_their_block_is_told(shape):
    q = quantize(jnp.asarray(random(shape)), block=SQUARE)
    hint = r" \(one scale per 1x128 .*. The scale fits block=\(128, 128\): pass it.$"
    with raises(ValueError, match=hint):
        dequantize(ScaledArray(q.values, q.scale))
    dequantize(ScaledArray(q.values, q.scale, block=SQUARE))
    with raises(ValueError, match=r"got f32\[\d.*\]$"):  # of another size it fits neither block
        dequantize(ScaledArray(q.values, q.scale[..., :0]))


@pytest.mark.parametrize("as_array", [np.asarray, np.array, jnp.asarray, jnp.array])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (quantize, r"^ScaledArray: .*; got f8e4m3fn\[4,256\]. Use .dequantize\(\).$"),
        (quantize_weight, r"^QuantizedWeight: .*; got f32\[4,256\]. Use .weight.$"),
    ],
)
def test_is_no_array_of_numbers(make, message, as_array):
    """NumPy would make an array of rank 0 that holds one object."""
    quantised = make(jnp.asarray(random((4, 256))))
    with raises(TypeError, match=message):
        as_array(quantised)


def test_dequantize_into_an_unsupported_dtype():
    with raises(TypeError, match="dtype must be bf16, f16 or f32; got s32"):
        dequantize(quantize(jnp.ones((1, 1))), jnp.int32)
