"""What each policy of jax.checkpoint saves of our products, and how many products run again."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from assertions import assert_all_same_bits
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matmul_cases import saved_residuals
from meshes import mesh

from jax_fp8gemm import Recipe, checkpoint_policies, dot_general, matmul, ragged_dot
from jax_fp8gemm.moe import moe_layer
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec

M = K = 256
DIMS = (((1,), (0,)), ((), ()))
SIZES = jnp.asarray((100, 156), jnp.int32)
PRODUCTS = (
    *("dot_general", "ragged_dot_general"),
    *("jax_fp8gemm_gemm", "jax_fp8gemm_grouped_gemm", "jax_fp8gemm_grouped_wgrad"),
)
LAYERS, DLHS, DRHS = 4, 3, 4  # of the first layer no gradient of x is wanted
AGAIN = LAYERS - 1  # the result of the last product is the output


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def batched(product):
    return lambda x, w: product(x.reshape(2, M // 2, K), w).reshape(M, K)


MATRIX, MATRICES = [struct(K, K)] * LAYERS, [struct(2, K, K)] * LAYERS
EXPERTS = [(struct(8, K, 2 * K), struct(8, K, K))] * (LAYERS // 2)  # two products each
KEPT = Recipe(kept_gate_up="fp8")
layer = lambda x, w, **how: moe_layer(x, x[:, :8], *w, top_k=2, **how)
OURS = {
    "matmul": (matmul, MATRIX),
    "dot_general": (partial(dot_general, dimension_numbers=DIMS), MATRIX),
    "batch": (batched(matmul), MATRICES),
    "ragged_dot": (partial(ragged_dot, group_sizes=SIZES), MATRICES),
    "moe_layer": (layer, EXPERTS),
    "expert_axis": (partial(layer, expert_axis="x"), EXPERTS),
    "moe_layer, FP8 gate_up": (partial(layer, recipe=KEPT), EXPERTS),
    "expert_axis, FP8 gate_up": (partial(layer, recipe=KEPT, expert_axis="x"), EXPERTS),
}
JAX = {"matmul": (jnp.matmul, MATRIX), "batch": (batched(jnp.matmul), MATRICES)}


def model(product, policy):
    """Four products with an activation before each, under jax.checkpoint."""

    @partial(jax.checkpoint, policy=policy)
    def run(weights, x):
        for w in weights:
            x = product(jax.nn.silu(x), w)
        return x

    return run


def num_products(product, weights, policy):
    """The number of products that value and gradient take."""
    loss = lambda weights, x: model(product, policy)(weights, x).astype(jnp.float32).sum()
    with jax.set_mesh(mesh(AxisType.Auto)):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(weights, struct(M, K)).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _count(jaxpr)


def _count(jaxpr):
    inner = [jaxpr for eqn in jaxpr.eqns for jaxpr in jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name in PRODUCTS for eqn in jaxpr.eqns) + sum(map(_count, inner))


ALL_BUT_WEIGHTS = checkpoint_policies.save_all_but_weights
ONCE = LAYERS + DLHS + DRHS


@pytest.mark.parametrize("name", OURS)
def test_no_product_runs_again_where_its_result_is_saved(name):
    policies = checkpoint_policies
    for policy in (policies.save_products, policies.dots_saveable):
        assert num_products(*OURS[name], policy) == ONCE
    expected = ONCE + AGAIN if name == "batch" else ONCE
    assert num_products(*OURS[name], policies.dots_with_no_batch_dims_saveable) == expected


@pytest.mark.parametrize("name", ["expert_axis", "expert_axis, FP8 gate_up"])
def test_no_product_runs_again_where_turns_may_be_left(name, traced_anew, monkeypatch):
    """Turns are branches of the program, and loops. All of their products are counted."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    expected = num_products(*OURS[name], jax.checkpoint_policies.everything_saveable)
    assert expected > ONCE
    assert num_products(*OURS[name], checkpoint_policies.save_products) == expected
    assert num_products(*OURS[name], jax.checkpoint_policies.nothing_saveable) > expected


@pytest.mark.parametrize("name", ["matmul", "dot_general", "batch"])
@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
def test_as_many_products_as_in_bf16_under_the_policy_of_jax(name, policy):
    expected = num_products(
        *JAX["batch" if name == "batch" else "matmul"], getattr(jax.checkpoint_policies, policy)
    )
    assert num_products(*OURS[name], getattr(checkpoint_policies, policy)) == expected
    # The reason for these policies. If JAX's own know our products one day, they may go.
    theirs = num_products(*OURS[name], getattr(jax.checkpoint_policies, policy))
    assert theirs == ONCE + AGAIN


def test_a_product_of_jax_is_saved_as_well():
    for policy in ("dots_saveable", "dots_with_no_batch_dims_saveable"):
        assert num_products(*JAX["matmul"], getattr(checkpoint_policies, policy)) == ONCE


OUT = f"bf16[{M},{K}]"
LHS = f"f8e4m3fn[{K},{M}]", f"f32[{K},{M // 128}]"
RHS = f"f8e4m3fn[{K},{K}]", f"f32[{K // 128},{K // 128}]"


@pytest.mark.parametrize(
    "name, saved",
    [
        ("save_products", [OUT] * AGAIN),
        ("dots_saveable", [OUT] * AGAIN),
        ("dots_with_no_batch_dims_saveable", [OUT] * AGAIN),
        ("save_quantized", [*LHS, *RHS] * LAYERS),
    ],
)
def test_what_a_policy_saves(name, saved):
    run = model(matmul, getattr(checkpoint_policies, name))
    found = saved_residuals(lambda x, *weights: run(weights, x), struct(M, K), *MATRIX)
    assert found == sorted(saved)


@pytest.mark.parametrize("name", OURS)
def test_all_but_weights_runs_no_product_again(name):
    expected = num_products(*OURS[name], jax.checkpoint_policies.everything_saveable)
    assert num_products(*OURS[name], checkpoint_policies.save_all_but_weights) == expected


def of_slices(product):
    """The product with the transpose of a slice of an f32 weight (2, n, k), which is cast."""
    return lambda x, w: product(x, w[1].T.astype(jnp.bfloat16))


@pytest.mark.parametrize("is_sliced", [False, True])
def test_all_but_weights_saves_all_but_weights(is_sliced):
    product, weights = matmul, MATRIX
    if is_sliced:
        product, weights = (
            of_slices(matmul),
            [jax.ShapeDtypeStruct((2, K, K), jnp.float32)] * LAYERS,
        )

    def saved(policy):
        run = model(product, policy)
        return Counter(saved_residuals(lambda x, *ws: run(ws, x), struct(M, K), *weights))

    found, all_ = map(saved, (ALL_BUT_WEIGHTS, jax.checkpoint_policies.everything_saveable))
    assert all_ - found == Counter([*RHS] * LAYERS)
    assert found - all_ == Counter()


def test_all_but_weights_saves_no_weight_that_explicit_axes_cut():
    on = mesh(AxisType.Explicit)
    cut = NamedSharding(on, PartitionSpec("x"))
    x, *weights = (jax.ShapeDtypeStruct((K, K), jnp.bfloat16, sharding=cut),) * (1 + LAYERS)

    def saved(policy):
        pullback = lambda x, *ws: jax.tree.leaves(jax.vjp(model(matmul, policy), ws, x)[1])
        return Counter(leaf.dtype for leaf in jax.eval_shape(pullback, x, *weights))

    with jax.set_mesh(on):
        found, all_ = map(saved, (ALL_BUT_WEIGHTS, jax.checkpoint_policies.everything_saveable))
    fp8 = jnp.dtype(jnp.float8_e4m3fn)
    assert (found[fp8], all_[fp8]) == (LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("product", [matmul, of_slices(matmul)], ids=["bf16", "slices"])
def test_gradients_with_weights_quantised_again_have_the_same_bits(product):
    shape = (LAYERS, K, K) if product is matmul else (LAYERS, 2, K, K)
    x, weights = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(jax.random.split(jax.random.key(0)), [(M, K), shape], strict=True)
    )

    @partial(jax.jit, static_argnums=0)
    def gradients(again, x, weights):
        layer = lambda x, w: x + product(jax.nn.silu(x), w)
        if again:
            layer = jax.checkpoint(layer, policy=ALL_BUT_WEIGHTS, prevent_cse=False)
        run = lambda x, ws: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]
        return jax.grad(lambda *args: run(*args).astype(jnp.float32).sum(), (0, 1))(x, weights)

    assert_all_same_bits(gradients(True, x, weights), gradients(False, x, weights))


def test_policies_join():
    policies = checkpoint_policies
    both = jax.checkpoint_policies.save_from_both_policies(
        policies.save_products, policies.save_quantized
    )
    run = model(matmul, both)
    found = saved_residuals(lambda x, *weights: run(weights, x), struct(M, K), *MATRIX)
    assert found == sorted([OUT] * AGAIN + [*LHS, *RHS] * LAYERS)
