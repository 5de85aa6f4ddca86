"""Gated activations other than SwiGLU, quantised: against float64, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import swiglu_cases
from errors import raises
from gated_activations import DEEPSEEK_V4, GPT_OSS, NAMES, OTHERS, gated, gated_grad, truth
from jax.sharding import AxisType, PartitionSpec
from swiglu_cases import E4M3
from test_swiglu import FIRST_ROW, SIZES, F, M, normal, quantized

from jax_fp8gemm._primitives import gated as plain
from jax_fp8gemm._tuning import quantize_config
from jax_fp8gemm.moe import ClampedSwiglu

activations = pytest.mark.parametrize("activation", OTHERS, ids=NAMES)
is_grads = pytest.mark.parametrize("is_grad", (False, True), ids=("h", "grad"))


def _operands(is_grad, dtype=np.float32):
    """Gates and ups of up to about 12, beyond the bounds of the models that have some."""
    gate_up = (4 * normal(M, 2 * F)).astype(dtype)
    return [gate_up, normal(M, F, dtype=dtype, seed=1)] if is_grad else [gate_up]


@activations
@is_grads
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
def test_values_are_the_nearest_to_float64(activation, is_grad, dtype):
    operands = _operands(is_grad, dtype)
    rows, columns = quantized(*operands, activation=activation)
    x, magnitude = truth(operands, activation)
    # XLA's erfc and exp, and 1 - sigma from a rounded sigma.
    error = 2e-5
    swiglu_cases.assert_nearest(rows, x, magnitude, E4M3, False, "rows", error)
    x, magnitude = (swiglu_cases.in_columns(y, SIZES, FIRST_ROW)[0] for y in (x, magnitude))
    swiglu_cases.assert_nearest(columns, x, magnitude, E4M3, False, "columns", error)


def _published(activation):
    """The activation as JAX's own functions, or those of the models, compute it."""
    if isinstance(activation, str):
        act = {
            "gelu": lambda x: jax.nn.gelu(x, approximate=False),
            "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
            "relu2": lambda x: jnp.square(jax.nn.relu(x)),
        }[activation]
        return lambda gate, up: act(gate) * up
    limit, alpha, offset = activation.limit, activation.alpha, activation.up_offset

    def clamped(gate, up):
        gate, up = jnp.clip(gate, None, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (up + offset)

    return clamped


@activations
def test_a_gradient_in_a_shard_map_is_that_outside(activation):
    gate_up, dh = _operands(True)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("i")
    grad = lambda *operands: plain.gated_grad(*operands, activation)
    sharded = jax.shard_map(grad, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    found = np.asarray(jax.jit(sharded)(gate_up, dh), np.float64)
    np.testing.assert_array_equal(found, jax.jit(grad)(gate_up, dh))
    split = lambda x: np.split(np.asarray(x, np.float64), 2, axis=1)
    expected = gated_grad(*split(gate_up), np.asarray(dh, np.float64), activation)[:2]
    for x, y in zip(split(found), expected, strict=True):
        # XLA's erfc and exp. The absolute bound is for tails, where both are almost 0.
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)


@activations
def test_the_float64_reference_is_the_published_formula(activation):
    gate_up, dh = _operands(True)
    with jax.enable_x64(True):
        operands = [jnp.asarray(x, jnp.float64) for x in np.split(gate_up, 2, axis=1)]
        h, pullback = jax.vjp(_published(activation), *operands)
        expected = pullback(jnp.asarray(dh, jnp.float64))
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(gated(gate, up, activation), h, rtol=1e-9, atol=1e-12)
    found = gated_grad(gate, up, dh.astype(np.float64), activation)[:2]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@activations
def test_the_gradient_is_that_of_the_values(activation):
    gate_up, dh = map(jnp.asarray, _operands(True))
    _, pullback = jax.vjp(lambda x: plain.gated(x, activation), gate_up)
    np.testing.assert_allclose(
        plain.gated_grad(gate_up, dh, activation), pullback(dh)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("activation", (DEEPSEEK_V4, GPT_OSS), ids=("deepseek_v4", "gpt_oss"))
def test_the_gradient_ends_behind_the_bounds(activation):
    limit = activation.limit
    beyond = np.nextafter(np.float32(limit), np.float32(np.inf))
    gate_up = np.array([[limit, beyond, -beyond, 1, 1, 1, 1, 1, limit, beyond, -limit, -beyond]])
    da = plain.gated_grad(jnp.asarray(gate_up, jnp.float32), jnp.ones((1, 6)), activation)[0]
    is_zero = np.asarray(da) == 0
    np.testing.assert_array_equal(np.flatnonzero(is_zero[[0, 1, 2, 8, 9, 10, 11]]), [1, 4, 6])


@activations
@is_grads
def test_a_nan_stays_one(activation, is_grad):
    operands = _operands(is_grad)
    operands[0][50, 3] = 1  # not a gate that relu2 has no gradient of
    operands[0][100, 3] = operands[0][50, F + 3] = np.nan
    rows, _ = quantized(*operands, activation=activation)
    is_nan = np.isnan(rows.scale).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(is_nan), [50, 100])


@activations
@is_grads
def test_the_custom_call_has_the_activation(activation, is_grad):
    operands = _operands(is_grad, jnp.bfloat16)
    function = lambda *x: quantized(*x, activation=activation)
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    constants = (0, 0, 0)
    if not isinstance(activation, str):
        constants = activation.limit, activation.alpha, activation.up_offset
        activation = "clamped_swiglu"
    number = quantize_config.ACTIVATIONS.index(activation)
    assert f"activation = {number} : i32" in text
    for name, value in zip(("limit", "alpha", "up_offset"), constants, strict=True):
        assert f"{name} = {np.float32(value).view(np.int32)} : i32" in text


@pytest.mark.parametrize(
    "values, error, message",
    [
        ((0.0,), ValueError, "limit must be above 0 in f32; got 0.0"),
        ((-7.0,), ValueError, "limit must be above 0 in f32; got -7.0"),
        ((1e-60,), ValueError, "limit must be above 0 in f32; got 1e-60"),
        ((np.nan,), ValueError, "limit must be finite in f32; got nan"),
        ((7.0, 1e39), ValueError, "alpha must be finite in f32; got 1e[+]39"),
        ((7.0, 1.0, 10**100), ValueError, "up_offset must be finite in f32; got int"),
        (("7",), TypeError, "limit must be a real number; got '7'"),
        ((7.0, True), TypeError, "alpha must be a real number; got True"),
        ((jnp.ones(()),), TypeError, r"limit must be a real number; got f32\[\]"),
    ],
    ids=str,
)
def test_constants_of_no_clamped_swiglu_raise(values, error, message):
    with raises(error, f"ClampedSwiglu: {message}"):
        ClampedSwiglu(*values)
