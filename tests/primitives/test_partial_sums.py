"""Products with split_k: which are added up in parts, and to which bits."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import without_annotation_checks
from hypothesis import given
from hypothesis import strategies as st
from partial_sums_cases import predicted

import jax_fp8gemm as jf
from jax_fp8gemm._data.split_k import count_parts, parts_of

RECIPE = jf.Recipe(split_k=True)
# m, n, k, and the parts that numerics.md promises.
DIVIDED = [
    (1, 8, 3584, 8),
    (5, 136, 4000, 8),
    (9, 896, 3472, 8),
    (2, 904, 5120, 6),
    (3, 1024, 5008, 6),
    (64, 24, 3584, 8),
]
WHOLE = [(65, 24, 3584), (2, 1032, 5120), (8, 136, 3456), (2, 904, 4992)]


def _operands(m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    lhs = reference.quantize(rng.standard_normal((m, k), np.float32))
    rhs = reference.quantize(rng.standard_normal((n, k), np.float32), (128, 128))
    scaled = lambda x, block: jf.ScaledArray(jnp.asarray(x[0]), jnp.asarray(x[1]), block=block)
    return scaled(lhs, (1, 128)), scaled(rhs, (128, 128))


def _multiply(lhs, rhs, **how):
    how = dict(out_dtype=jnp.float32, implementation="emulate") | how
    return np.asarray(jf.scaled_matmul(lhs, rhs, **how))


@pytest.mark.parametrize("m, n, k, parts", DIVIDED)
def test_emulation_has_the_bits_of_the_model(m, n, k, parts):
    lhs, rhs = _operands(m, n, k)
    out = _multiply(lhs, rhs, split_k=True)
    rng = np.random.default_rng(1)
    rows, cols = rng.integers(0, m, 256), rng.integers(0, n, 256)
    matrices = map(np.asarray, (lhs.values, lhs.scale, rhs.values, rhs.scale))
    expected = predicted(*matrices, rows, cols, parts)
    reference.assert_same_bits(out[rows, cols], expected)
    assert (out != _multiply(lhs, rhs)).any(), "the order of a sum must show in some bits"
    half = _multiply(lhs, rhs, split_k=True, out_dtype=jnp.bfloat16)
    reference.assert_same_bits(half, out.astype(jnp.bfloat16))


@pytest.mark.parametrize("m, n, k", WHOLE)
def test_other_products_keep_their_bits(m, n, k):
    lhs, rhs = _operands(m, n, k)
    reference.assert_same_bits(_multiply(lhs, rhs, split_k=True), _multiply(lhs, rhs))


def test_sums_of_an_array_and_of_rows_of_scales_keep_their_bits():
    lhs, rhs = _operands(8, 128, 3584)
    accum = jnp.ones((8, 128), jnp.float32)
    how = dict(accumulate_into=accum)
    out, whole = (_multiply(lhs, rhs, split_k=split, **how) for split in (True, False))
    reference.assert_same_bits(out, whole)
    rows = jf.quantize(jnp.asarray(rhs.dequantize(jnp.float32)), block=(1, 128))
    out, whole = (_multiply(lhs, rows, split_k=split) for split in (True, False))
    reference.assert_same_bits(out, whole)


@pytest.mark.parametrize("dims", [(None, 0), (0, 0)], ids=["rhs", "both"])
def test_vmap_over_weights_changes_no_bit(dims):
    """Nine weights of 128 columns have more columns together than a product in parts may have."""
    lhs, rhs = _operands(2, 9 * 128, 3584)
    weights = jax.tree.map(lambda x: x.reshape(9, -1, x.shape[1]), rhs)
    run = lambda lhs, rhs: jf.scaled_matmul(lhs, rhs, split_k=True, implementation="emulate")
    rows = jax.tree.map(lambda x: jnp.stack([x] * 9), lhs) if dims[0] == 0 else lhs
    found = jax.vmap(run, in_axes=dims)(rows, weights)
    for i in range(9):
        alone = run(lhs, jax.tree.map(lambda x, i=i: x[i], weights))
        reference.assert_same_bits(found[i], alone)


def test_no_other_row_changes_a_row():
    lhs, rhs = _operands(64, 40, 3600)
    whole = _multiply(lhs, rhs, split_k=True)
    for m in (1, 7, 8, 17, 40):
        few = jf.ScaledArray(lhs.values[:m], lhs.scale[:m], block=(1, 128))
        reference.assert_same_bits(_multiply(few, rhs, split_k=True), whole[:m])


@pytest.mark.parametrize("m, n, k, parts", DIVIDED)
def test_reference_is_as_near_to_the_truth(m, n, k, parts):
    lhs, rhs = _operands(m, n, k)
    out = _multiply(lhs, rhs, split_k=True, implementation="xla")
    real = lambda x: np.asarray(x.dequantize(jnp.float32), np.float64)
    truth = real(lhs) @ real(rhs).T
    # f32 sums of 28 or more k-blocks. Values are up to 3, and results about sqrt(k).
    assert np.abs(out - truth).max() < 2e-5 * np.sqrt(k) * np.sqrt(k / 128)


@given(st.integers(1, 3000), st.integers(1, 8))
def test_parts_are_all_blocks_in_order(num_blocks, count):
    parts = parts_of(num_blocks, count)
    assert len(parts) == count
    assert [b for first, behind in parts for b in range(first, behind)] == list(range(num_blocks))
    lengths = [behind - first for first, behind in parts]
    assert lengths[0] == max(lengths) == -(-num_blocks // count)


def test_extents_that_a_program_leaves_open_are_not_divided():
    (m,) = jax.export.symbolic_shape("m")
    with without_annotation_checks():
        assert count_parts(m, 136, 32) == count_parts(8, m, 32) == count_parts(8, 136, m) == 1
    assert count_parts(8, 136, 32) == 8


def test_matmul_and_its_gradient_of_lhs_are_divided():
    """The gradient of lhs sums over the 3584 columns; the gradient of rhs is another product."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    x, w, dout = draw(8, 128), draw(128, 3584), draw(8, 3584)

    def gradients(recipe):
        out = lambda x, w: jf.matmul(
            x, w, recipe=recipe, implementation="emulate", preferred_element_type=jnp.float32
        )
        return jax.vjp(out, x, w)[1](dout.astype(jnp.float32))

    rows = jf.quantize(dout.astype(jnp.float32), block=(1, 128), implementation="xla")
    weights = jf.quantize(w, block=(128, 128), implementation="xla")
    expected = _multiply(rows, weights, split_k=True).astype(jnp.bfloat16)
    (dx, dw), (_, whole_dw) = gradients(RECIPE), gradients(jf.Recipe())
    reference.assert_same_bits(np.asarray(dx), expected)
    reference.assert_same_bits(np.asarray(dw), np.asarray(whole_dw))


def test_vmap_of_lhs_is_one_product_of_all_rows():
    lhs, rhs = _operands(6, 128, 3584)
    of_three = jf.ScaledArray(
        lhs.values.reshape(2, 3, -1), lhs.scale.reshape(2, 3, -1), block=(1, 128)
    )
    one = lambda x: jf.scaled_matmul(
        x, rhs, out_dtype=jnp.float32, split_k=True, implementation="emulate"
    )
    out = jax.vmap(one)(of_three)
    expected = _multiply(lhs, rhs, split_k=True)
    reference.assert_same_bits(np.asarray(out).reshape(6, 128), expected)


def test_explain_names_the_parts():
    x, w = jnp.ones((8, 4096), jnp.bfloat16), jnp.ones((4096, 576), jnp.bfloat16)
    config = lambda recipe: jf.explain(lambda x, w: jf.matmul(x, w, recipe=recipe), x, w).records[
        -1
    ]["config"]
    assert "k added up in parts by clusters of 8" in config(RECIPE)
    assert "parts" not in config(jf.Recipe())


@pytest.mark.parametrize(
    "fields",
    [dict(split_k=1), dict(split_k=True, fwd=None), dict(split_k=True, batch_invariant=True)],
    ids=str,
)
def test_a_recipe_of_no_meaning_is_refused(fields):
    with without_annotation_checks(), pytest.raises(ValueError, match="Recipe: split_k must .*got"):
        jf.Recipe(**fields)


def test_split_k_of_another_type_is_refused():
    lhs, rhs = _operands(8, 128, 256)
    message = "scaled_matmul: split_k must be True or False; got 8"
    with without_annotation_checks(), pytest.raises(TypeError, match=message):
        jf.scaled_matmul(lhs, rhs, split_k=8)
