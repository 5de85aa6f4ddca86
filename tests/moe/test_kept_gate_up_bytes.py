"""What a gated MLP keeps for its backward pass with gate_up in FP8: arrays, bytes, policies."""

import jax
import jax.numpy as jnp
import pytest
from assertions import assert_all_same_bits
from kept_gate_up_cases import (
    KEPT,
    in_one_program,
    is_gate_up,
    mlp,
    mlp_of,
    residuals,
)
from moe_cases import F, M, problem

from benchmarks.families.moe import LAYERS
from jax_fp8gemm import DEEPSEEK_V3, checkpoint_policies
from jax_fp8gemm._data import checks


def num_bytes(arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_residuals_are_fp8_alone(dtype):
    operands = problem(dtype)[:3]
    found, default = (residuals(mlp(r), *operands) for r in (KEPT, DEEPSEEK_V3))
    short = lambda arrays: sorted(map(checks.short_type, arrays))
    unquantised = [x for x in default if is_gate_up(x, 2 * F)]
    same = [x for x in default if not is_gate_up(x, 2 * F)]
    assert len(unquantised) == 1
    assert short(found) == sorted([*short(same), f"f8e4m3fn[{M},{2 * F}]", f"f32[{M},2]"])
    itemsize = jnp.dtype(dtype).itemsize
    assert num_bytes(default) - num_bytes(found) == M * (2 * F * (itemsize - 1) - 2 * 4)


@pytest.mark.parametrize(
    "name, default, kept",
    [
        ("deepseek_v3_ep32", 588, 458),
        ("qwen3_30b_a3b_ep8", 201, 153),
        ("mixtral_8x7b", 1268, 813),
        ("deepseek_v3_ep8", 328, 263),
    ],
)
def test_bytes_of_real_layers(name, default, kept):
    """Those of docs/recipes.md, in MB, without the weights, which alone have three dimensions."""
    (e,) = (e for e in LAYERS if e.name == name)
    shapes = (e.rows, e.hidden), (e.groups, e.hidden, 2 * e.inter), (e.groups, e.inter, e.hidden)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    for recipe, expected in ((DEEPSEEK_V3, default), (KEPT, kept)):
        arrays = residuals(mlp_of(recipe, [0] * e.groups), *operands)
        assert round(num_bytes(x for x in arrays if x.ndim == 2) / 1e6) == expected


def test_a_scan_over_layers_stores_it_in_fp8():
    """As XLA plans the memory of the program, forward and backward."""
    layers, f = 8, 512
    x, *weights, _ = problem(f=f)
    stacked = [jnp.stack([w] * layers) for w in weights]

    def temp_bytes(recipe):
        step = lambda x, weights: (mlp(recipe)(x, *weights), None)
        loss = lambda x, weights: jax.lax.scan(step, x, weights)[0].sum()
        return jax.jit(jax.grad(loss)).lower(x, stacked).compile().memory_analysis()

    saved = temp_bytes(DEEPSEEK_V3).temp_size_in_bytes - temp_bytes(KEPT).temp_size_in_bytes
    # XLA's loops on a CPU hold FP8 as f16, in the place of f32; one scale for each block of 128.
    assert saved > 0.99 * layers * M * 2 * f * (4 - 2 - 4 / 128)


def names_of(jaxpr, name):
    return str(jaxpr).count(f"jax_fp8gemm_{name}[")


@pytest.mark.parametrize(
    "policy, products, quantised_h, saved",
    [
        # The grouped products of value and gradients; those of h; what is saved of gate_up and h.
        ("save_products", 4, 2, ["f32[200,2]", "f8e4m3fn[200,192]", f"f8e4m3fn[{F},768]"]),
        ("save_quantized", 5, 2, [f"f8e4m3fn[{F},768]"]),
        ("dots_with_no_batch_dims_saveable", 4, 3, ["f32[200,192]"]),
        (None, 5, 3, []),
    ],
)
def test_policies(policy, products, quantised_h, saved):
    *operands, dout = problem()
    policy = policy and getattr(checkpoint_policies, policy)
    run = jax.checkpoint(mlp(KEPT), policy=policy)
    pulled = jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[1](dout))(*operands)
    assert names_of(pulled, "grouped_gemm") == products
    types = list(map(checks.short_type, residuals(run, *operands)))
    wanted = [f"f8e4m3fn[{F},768]", f"f8e4m3fn[{M},{2 * F}]", f"f32[{M},2]", f"f32[{M},{2 * F}]"]
    assert sorted(x for x in types if x in wanted) == sorted(saved)
    found = in_one_program(run, operands, dout)
    assert_all_same_bits(found, in_one_program(mlp(KEPT), operands, dout))
