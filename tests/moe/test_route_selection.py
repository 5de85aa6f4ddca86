"""How route chooses: the bias, groups, ties and the load; its weights where scores underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises, without_annotation_checks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_moe import random

from jax_fp8gemm.moe import route

M, E, TOP_K = 24, 12, 3
LOGITS, BIAS = random(M, E, seed=1), random(E, seed=4)
GROUPS = dict(n_group=4, topk_group=2)
V3 = dict(scoring="sigmoid", bias=BIAS, scale=2.5, **GROUPS)


def test_the_bias_is_in_the_choice_and_not_in_the_weights():
    logits = jnp.asarray([[0.0, 1, 2, 3]])
    bias = jnp.asarray([9.0, 0, 5, 0])
    indices, weights = route(logits, 2, bias=bias, scoring="sigmoid", normalize=False)
    np.testing.assert_array_equal(indices, [[0, 2]])
    np.testing.assert_allclose(weights, [[0.5, 1 / (1 + np.exp(-2))]], rtol=1e-6)
    # A bias alike for all experts changes nothing.
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        found = route(LOGITS, TOP_K, bias=jnp.full(E, 0.5), scoring=scoring)
        jax.tree.map(reference.assert_same_bits, found, route(LOGITS, TOP_K, scoring=scoring))


def test_the_bias_has_no_gradient():
    weights = lambda logits, bias: route(logits, TOP_K, **V3 | dict(bias=bias, normalize=False))[
        1
    ].sum()
    dlogits, dbias = jax.grad(weights, (0, 1))(LOGITS, BIAS)
    assert np.count_nonzero(dlogits) == M * TOP_K
    np.testing.assert_array_equal(dbias, np.zeros(E))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_bias_of_another_dtype_is_added_in_f32(dtype):
    bias = BIAS.astype(dtype)
    found = route(LOGITS, TOP_K, **V3 | dict(bias=bias))
    expected = route(LOGITS, TOP_K, **V3 | dict(bias=bias.astype(jnp.float32)))
    jax.tree.map(reference.assert_same_bits, found, expected)


def test_a_group_is_as_good_as_its_two_best_experts():
    """Not as its best one, which is in the group that is left out."""
    logits = jnp.asarray([[3.0, -9, -9, 2, 2, -9, 1, 1, 1]])
    indices, _ = route(logits, 3, scoring="sigmoid", n_group=3, topk_group=2)
    np.testing.assert_array_equal(indices, [[3, 4, 6]])
    all_groups = route(logits, 3, scoring="sigmoid", n_group=3, topk_group=3)
    jax.tree.map(reference.assert_same_bits, all_groups, route(logits, 3, scoring="sigmoid"))


def test_of_equal_groups_and_equal_experts_the_first_is_chosen():
    indices, weights = route(jnp.zeros((2, E)), 5, **GROUPS, scoring="sigmoid")
    np.testing.assert_array_equal(indices, [[0, 1, 2, 3, 4]] * 2)
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)
    bias = jnp.asarray([0.0, -0.0, 0, 0, -0.0, 0])
    indices, _ = route(jnp.full((1, 6), -200.0), 6, bias=bias, scoring="sigmoid")
    np.testing.assert_array_equal(indices, [range(6)])


@pytest.mark.parametrize("masked", ["logits", "bias"])
def test_an_expert_of_another_group_comes_after_masked_ones(masked):
    """The best group has one expert that is not masked; the other groups have finite ranks."""
    logits = jnp.asarray([[9.0, -np.inf, -np.inf, 1, 1, 1]])
    bias = None
    if masked == "bias":
        logits, bias = jnp.asarray([[9.0, 0, 0, -9, -9, -9]]), jnp.zeros(6).at[2].set(-np.inf)
    indices, _ = route(logits, 3, scoring="sigmoid", bias=bias, n_group=2, topk_group=1)
    expected = [3, 4, 5] if masked == "logits" else [0, 1, 2]
    np.testing.assert_array_equal(indices, [expected])


def test_masked_experts_of_a_kept_group():
    logits = jnp.asarray([[-9.0, -9, -9, -9, 9, -np.inf, 9, -np.inf]])
    indices, _ = route(logits, 4, scoring="sigmoid", n_group=2, topk_group=1)
    np.testing.assert_array_equal(indices, [[4, 6, 5, 7]])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (0, 5)], ids=str)
def test_any_leading_dimensions(shape):
    logits = random(*shape, E, seed=2)
    indices, weights, load = route(logits, TOP_K, return_load=True, **V3)
    assert indices.shape == weights.shape == (*shape, TOP_K)
    flat = route(logits.reshape(-1, E), TOP_K, **V3)
    np.testing.assert_array_equal(indices.reshape(-1, TOP_K), flat[0])
    np.testing.assert_array_equal(weights.reshape(-1, TOP_K), flat[1])
    np.testing.assert_array_equal(load, np.bincount(np.ravel(indices), minlength=E))
    assert load.dtype == jnp.int32


def test_vmap():
    """Of each element the load too; of logits and a bias that both vary."""
    logits, bias = random(3, M, E, seed=2), random(3, E, seed=5)
    run = lambda logits, bias: route(logits, TOP_K, return_load=True, **V3 | dict(bias=bias))
    found = jax.vmap(run)(logits, bias)
    for i in range(3):
        for x, y in zip(found, run(logits[i], bias[i]), strict=True):
            np.testing.assert_array_equal(x[i], y)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type):
    """Tokens, experts and the bias are cut."""
    where = mesh(axis_type, axis_type, shape=(2, 2))
    place = lambda x, *spec: jax.device_put(np.asarray(x), NamedSharding(where, P(*spec)))
    run = lambda logits, bias: route(logits, TOP_K, return_load=True, **V3 | dict(bias=bias))
    found = jax.jit(run)(place(LOGITS.reshape(4, -1, E), "x", None, "y"), place(BIAS, "y"))
    expected = jax.jit(run)(LOGITS.reshape(4, -1, E), BIAS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("normalize", [True, False])
def test_sqrtsoftplus_where_softplus_underflows(normalize):
    """exp(-200) is 0 in f32, and the root of a tiny number has a steep derivative."""
    logits = np.asarray([[-60.0, -61, -200, -220, -17.9, -18.1, 90, 0]])
    exact = np.sqrt(np.log1p(np.exp(np.minimum(logits, 30)))) * (logits <= 30)
    exact += np.sqrt(np.maximum(logits, 0)) * (logits > 30)
    order = np.argsort(-logits[0])
    expected = exact[:, order] / (exact.sum() if normalize else 1)
    how = dict(scoring="sqrtsoftplus", normalize=normalize)
    x = jnp.asarray(logits, jnp.float32)
    _, weights = route(x, 8, **how)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-38)  # f32's smallest
    # The derivative of a root of exp(x) is half of it.
    gradient = jax.grad(lambda x: route(x, 8, **how)[1][0, -3])(x)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_allclose(gradient[0, 1], expected[0, -3] / 2, rtol=1e-4)


@pytest.mark.parametrize("logit", [177.0, 178.0, 1e4])
def test_sqrtsoftplus_of_large_logits_has_a_derivative(logit):
    weight = lambda x: route(x, 1, scoring="sqrtsoftplus", normalize=False)[1].sum()
    gradient = jax.grad(weight)(jnp.asarray([[logit, 0.0]]))
    np.testing.assert_allclose(gradient, [[0.5 / np.sqrt(logit), 0]], rtol=1e-5)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_scores_that_all_underflow_keep_their_ratio(scoring):
    logits = jnp.asarray([[-250.0, -251, -300]])
    weights = route(logits, 2, scoring=scoring)[1]
    gap = 1 if scoring == "sigmoid" else 0.5
    np.testing.assert_allclose(weights[0, 0], 1 / (1 + np.exp(-gap)), rtol=1e-5)


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        (dict(bias=BIAS[1:]), ValueError, r"for each of 12 experts; got bias f32\[11\]"),
        (dict(bias=BIAS[None]), ValueError, r"for each of 12 experts; got bias f32\[1,12\]"),
        (dict(bias=BIAS.astype(int)), TypeError, "bias must be bf16, f16 or f32; got bias s32"),
        (dict(bias=0.0), TypeError, "bias must be an array; got float"),
        (dict(n_group=4), ValueError, "must go together; got n_group 4, topk_group None"),
        (dict(topk_group=4), ValueError, "must go together; got n_group None, topk_group 4"),
        (dict(n_group=5, topk_group=1), ValueError, r"of 2 or more; got 5, logits f32\[24,12\]"),
        (dict(n_group=12, topk_group=3), ValueError, "groups of 2 or more; got 12, logits"),
        (dict(n_group=0, topk_group=1), ValueError, "groups of 2 or more; got 0, logits"),
        (dict(n_group=4, topk_group=5), ValueError, "topk_group must be 1..n_group; got 5, n_gr"),
        (dict(n_group=4, topk_group=0), ValueError, "topk_group must be 1..n_group; got 0, n_gr"),
        (dict(n_group=6, topk_group=1), ValueError,
         "top_k must be at most the 2 experts of topk_group 1 groups; got 3"),
        (dict(n_group=4.0, topk_group=2), TypeError, "n_group must be None or an integer; got 4.0"),
        (dict(scale=0), ValueError, "scale must be above 0 and finite in f32; got 0"),
        (dict(scale=np.inf), ValueError, "above 0 and finite in f32; got inf"),
        (dict(scale=10**400), ValueError, "above 0 and finite in f32; got int"),
        (dict(scale=True), TypeError, "scale must be a number of Python or NumPy; got True"),
        (dict(scale=jnp.float32(2)), TypeError, r"scale must be a number of .*; got f32\[\]"),
        (dict(return_load=None), TypeError, "return_load must be True or False; got None"),
    ],
)  # fmt: skip
def test_bad_arguments_raise(kwargs, error, message):
    with raises(error, match="^route: .*" + message):
        route(LOGITS, TOP_K, **kwargs)


@pytest.mark.parametrize("name", ["scale", "n_group", "topk_group"])
def test_arguments_that_must_be_static(name):
    with raises(TypeError, match=f"route: {name} must be static; got a traced"):
        jax.jit(lambda x: route(LOGITS, TOP_K, **GROUPS | {name: x}))(2)


def test_whole_numbers_of_numpy():
    how = dict(n_group=np.int64(4), topk_group=np.int32(2), scale=np.float32(2.5))
    with without_annotation_checks():  # which name Python's
        found = route(LOGITS, np.int64(TOP_K), **V3 | how)
    jax.tree.map(reference.assert_same_bits, found, route(LOGITS, TOP_K, **V3))
