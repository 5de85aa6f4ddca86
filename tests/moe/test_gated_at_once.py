"""Forward passes alone compute h where they multiply: grouped_gated_gemm, with the same bits."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from reference import assert_same_bits
from test_expert_parallel import auto_mesh
from test_moe import random

from jax_fp8gemm import Recipe, stats
from jax_fp8gemm.moe import ClampedSwiglu, moe_layer, moe_mlp, route
from jax_fp8gemm.moe import _mlp_products as _products

M, E, TOP_K, D, F = 64, 8, 2, 256, 128
SIZES = jnp.array([0, 9, 7, 1, 20, 8, 3, 10], jnp.int32)
LOGITS = random(M, E, seed=1)
PRIMITIVE = "jax_fp8gemm_grouped_gated_gemm"


@functools.cache
def problem(dtype=jnp.bfloat16, f=F):
    weights = random(E, D, 2 * f, seed=2, scale=D**-0.5), random(E, f, D, seed=3, scale=f**-0.5)
    return tuple(x.astype(dtype) for x in (random(M, D), *weights))


def mlp(x, w_gate_up, w_down, **options):
    return moe_mlp(x, w_gate_up, w_down, SIZES, **options)


def layer(x, w_gate_up, w_down, **options):
    return moe_layer(x, route(LOGITS, TOP_K), w_gate_up, w_down, **options)


def layer_on_mesh(*operands, **options):
    return layer(*operands, mesh=auto_mesh(4), expert_axis="x", **options)


@pytest.fixture
def at_once(traced_anew, monkeypatch):
    """Every size is large enough from here on."""

    def begin():
        monkeypatch.setattr(_products, "is_faster", lambda m, k, f, g: f % 128 == 0)
        jax.clear_caches()

    return begin


def names(function, *operands):
    return set(re.findall(r"jax_fp8gemm_\w+", str(jax.make_jaxpr(function)(*operands))))


@pytest.mark.parametrize("function", [mlp, layer, layer_on_mesh])
@pytest.mark.parametrize("implementation", ["xla", "emulate"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(activation=ClampedSwiglu(7.0, 1.702, 1.0)),
        dict(recipe=Recipe(fwd="e5m2", pow2_scale=True)),
    ],
    ids=str,
)
def test_the_bits_stay(at_once, function, implementation, options):
    run = functools.partial(function, implementation=implementation, **options)
    expected = jax.jit(run)(*problem())
    assert PRIMITIVE not in names(run, *problem())
    at_once()
    assert PRIMITIVE in names(run, *problem())
    assert_same_bits(jax.jit(run)(*problem()), expected)


@pytest.mark.parametrize("function", [mlp, layer, layer_on_mesh])
def test_with_a_gradient_gate_up_is_stored(at_once, function):
    at_once()
    loss = lambda *operands: function(*operands).astype(jnp.float32).sum()
    assert PRIMITIVE not in names(jax.grad(loss), *problem())


@pytest.mark.parametrize(
    "operands, options",
    [
        (problem(jnp.float32), {}),  # gate_up is f32
        (problem(f=192), {}),
        (problem(f=256), dict(gate_up_pieces=2)),
        (problem(), dict(biases=(jnp.ones((E, 2 * F)), jnp.ones((E, D))))),
        (problem(), dict(recipe=Recipe(wgrad="bf16"))),
    ],
    ids=["f32", "half a block", "pieces", "biases", "unfused"],
)
def test_what_the_kernel_does_not_compute(at_once, operands, options):
    at_once()
    assert PRIMITIVE not in names(functools.partial(mlp, **options), *operands)


def test_small_groups_are_left_to_two_kernels():
    assert PRIMITIVE not in names(mlp, *problem())


def test_a_forward_pass_of_large_groups_does_not_store_gate_up():
    """DeepSeek-V3's experts of one of 16 devices."""
    shapes = (65536, 7168), (16, 7168, 4096), (16, 2048, 7168)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    lowered = jax.jit(moe_mlp).trace(*operands, sizes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert re.findall(r"custom_call @(jax_fp8gemm_grouped\w+)", text) == [
        PRIMITIVE,
        "jax_fp8gemm_grouped_gemm",
    ]
    assert "65536x4096" not in text


def test_stats_has_the_numbers_of_two_kernels(at_once):
    records = [stats.collect(mlp)(*problem())[1].records()]
    at_once()
    records.append(stats.collect(mlp)(*problem())[1].records())
    assert len(records[0]) == 4  # x, h and the weights
    assert records[1] == records[0]
