import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import jax_fp8gemm
from jax_fp8gemm import BF16, DEEPSEEK_V3, HYBRID, Recipe


def test_presets():
    assert DEEPSEEK_V3 == Recipe(
        fwd="e4m3", bwd="e4m3", pow2_scale=False, wgrad="fp8", reduce_dtype="f32"
    )
    assert (HYBRID.fwd, HYBRID.bwd) == ("e4m3", "e5m2")
    assert DEEPSEEK_V3.is_fp8 and HYBRID.is_fp8 and not BF16.is_fp8


@pytest.mark.parametrize(
    "recipe, text",
    [
        (DEEPSEEK_V3, "Recipe()"),
        (HYBRID, "Recipe(bwd='e5m2')"),
        (BF16, "Recipe(fwd=None)"),
        (Recipe(pow2_scale=True, fp8_combine=True), "Recipe(pow2_scale=True, fp8_combine=True)"),
    ],
)
def test_repr_is_a_call_with_what_differs_from_the_defaults(recipe, text):
    assert repr(recipe) == text
    assert eval(text) == recipe


def test_html_lists_every_field():
    table = BF16._repr_html_()
    assert "<caption>Recipe(fwd=None)</caption>" in table
    assert "<tr><th>fwd</th><td>None</td></tr>" in table
    assert "<tr><th>bwd</th><td>&#x27;e4m3&#x27;</td></tr>" in table
    assert table.count("<tr>") == len(dataclasses.fields(Recipe))


def test_is_frozen_and_hashable():
    assert len({DEEPSEEK_V3, Recipe(), HYBRID, BF16}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEEPSEEK_V3.fwd = "e5m2"


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("fwd", "e4m3fn", "'e4m3' or 'e5m2' or None"),
        ("bwd", None, "'e4m3' or 'e5m2'"),
        ("lhs_block", (128, 128), "(1, 128)"),
        ("lhs_block", np.array([1, 128]), "(1, 128)"),
        ("pow2_scale", jnp.array(True), "False or True"),
        ("batch_invariant", 1, "False or True"),
        ("rhs_block", (1, 128), "(128, 128)"),
        ("pow2_scale", "yes", "False or True"),
        ("wgrad", "f32", "'fp8' or 'bf16'"),
        ("wgrad_lhs_block", (128, 1), "(1, 128) or (128, 128)"),
        ("reduce_dtype", "float32", "'f32' or 'bf16'"),
        ("fp8_combine", "fp8", "False or True"),
        ("kept_gate_up", "bf16", "'unquantised' or 'fp8'"),
        ("kept_gate_up", True, "'unquantised' or 'fp8'"),
    ],
)
def test_unsupported_values_are_named(field, value, expected):
    message = re.escape(f"Recipe: {field} must be {expected}; got {value!r}")
    with raises(ValueError, match=message):
        Recipe(**{field: value})


@pytest.mark.parametrize("fields", [dict(fwd=None), dict(wgrad="bf16")])
def test_fields_of_fp8_are_not_ignored(fields):
    with raises(ValueError, match="Recipe: fp8_combine must go with an FP8 fwd and wgrad='fp8'"):
        Recipe(**fields, fp8_combine=True)
    with raises(ValueError, match=r"Recipe: wgrad_lhs_block=\(128, 128\) must go with an FP8 fwd"):
        Recipe(**fields, wgrad_lhs_block=(128, 128))
    message = "Recipe: kept_gate_up='fp8' must go with an FP8 fwd and wgrad='fp8'; got fwd="
    with raises(ValueError, match=message):
        Recipe(**fields, kept_gate_up="fp8")
    assert Recipe(**fields, kept_gate_up="unquantised") == Recipe(**fields)


def test_ops_take_a_recipe_only():
    import jax.numpy as jnp

    x = jnp.ones((2, 2))
    with raises(TypeError, match="matmul: recipe must be a jax_fp8gemm.Recipe, .*; got 'fp8'"):
        jax_fp8gemm.matmul(x, x, recipe="fp8")


@pytest.mark.parametrize(
    "name, recipe",
    [
        ("deepseek_v3", jax_fp8gemm.DEEPSEEK_V3),
        ("hybrid", jax_fp8gemm.HYBRID),
        ("bf16", jax_fp8gemm.BF16),
    ],
)
def test_a_recipe_may_be_named(name, recipe):
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    experts = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 4, 4), x.dtype)
    sizes = jnp.asarray([2, 2])
    calls = {
        "matmul": lambda x, *_, recipe: jax_fp8gemm.matmul(x, x, recipe=recipe),
        "ragged_dot": lambda x, w, _, recipe: jax_fp8gemm.ragged_dot(x, w, sizes, recipe=recipe),
        "moe_mlp": lambda *args, recipe: jax_fp8gemm.moe.moe_mlp(*args, sizes, recipe=recipe),
        "moe_layer": lambda x, *w, recipe: jax_fp8gemm.moe.moe_layer(
            x, x[:, :2], *w, top_k=1, recipe=recipe
        ),
    }
    for call in calls.values():
        loss = lambda recipe, call=call: jax.make_jaxpr(
            jax.grad(lambda *args: call(*args, recipe=recipe).sum())
        )(x, *experts)
        assert str(loss(name)) == str(loss(recipe))
