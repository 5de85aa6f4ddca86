"""The weighted gradient of SwiGLU: that of dh times the weights, and dots of float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import weighted_swiglu_cases as cases
from errors import on_cpu, raises
from gated_activations import NAMES, OTHERS
from jax.interpreters import partial_eval

from jax_fp8gemm._primitives.swiglu_quantize import swiglu_grad_quantize
from jax_fp8gemm._primitives.weighted_swiglu_grad import weighted_swiglu_grad_quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
M, F = 200, 96  # the second scale block of 2 f holds gates and ups
SIZES, FIRST_ROW = (70, 0, 90), 7


def quantized(gate_up, dh, weights, *, sizes=SIZES, activation="silu", **kwargs):
    how = dict(with_columns=True, dtype=E4M3, pow2_scale=False, implementation=None) | kwargs
    arrays = map(jnp.asarray, (gate_up, dh, weights))
    of_groups = cases.groups(sizes, FIRST_ROW)
    return weighted_swiglu_grad_quantize(*arrays, *of_groups, activation=activation, **how)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("implementation", (None, "emulate"))
def test_it_quantises_the_gradient_of_weighted_dh(dtype, implementation):
    gate_up, dh, weights = cases.operands(M, F, dtype)
    how = dict(dtype=E5M2, pow2_scale=True, implementation=implementation)
    rows, columns, _ = quantized(gate_up, dh, weights, **how)
    of_groups = cases.groups(SIZES, FIRST_ROW)
    arrays = jnp.asarray(gate_up), jnp.asarray(cases.weighted(dh, weights))
    expected = swiglu_grad_quantize(*arrays, *of_groups, with_columns=True, **how)
    for found, wanted in zip((rows, columns), expected, strict=True):
        reference.assert_same_bits(found.scale, wanted.scale)
        reference.assert_same_bits(found.values, wanted.values)
    assert not np.asarray(rows.values[M // 2], np.float32).any()  # its weight is 0


@pytest.mark.parametrize("activation", ("silu", *OTHERS), ids=("silu", *NAMES))
@pytest.mark.parametrize("implementation", (None, "emulate"))
def test_dots_are_those_of_float64(activation, implementation):
    gate_up, dh, weights = cases.operands(50, 200, jnp.bfloat16)
    of_groups = cases.groups(SIZES, FIRST_ROW)
    dots = cases.partial_dots((gate_up, dh, weights), of_groups, implementation, activation)
    assert dots.shape == (2, 50)
    cases.assert_dots(dots, gate_up, dh, activation)


def test_the_emulation_adds_in_the_order_of_the_kernel():
    """8 features one after another; then 16 such sums: those 8 apart, then 4, 2 and 1."""
    gate_up, dh, weights = cases.operands(20, 136, jnp.float32)
    # h is up: gates of 1e4 have a sigma of 1, and ups are divided by them exactly.
    up = np.ldexp(np.round(8 * gate_up[:, 136:]), -16).astype(np.float32)
    gate_up = np.concatenate([np.full_like(up, 2.0**14), up], axis=1)
    h = up * np.float32(2.0**14)
    of_groups = cases.groups(SIZES, FIRST_ROW)
    dots = cases.partial_dots((gate_up, dh, weights), of_groups, "emulate")
    products = [np.pad(x.astype(np.float64), ((0, 0), (0, 120))) for x in (h, dh)]
    h, dh = (x.reshape(20, 2, 16, 8) for x in products)
    sums = np.zeros((20, 2, 16), np.float32)
    for j in range(8):
        # h has few bits, so that the product and its sum with an f32 are nearly exact in float64.
        sums = (h[..., j] * dh[..., j] + sums).astype(np.float32)
    for apart in (8, 4, 2, 1):
        sums = sums[..., :apart] + sums[..., apart:]
    reference.assert_same_bits(dots, np.ascontiguousarray(sums[..., 0].T))


def test_without_columns_the_rest_stays():
    operands = cases.operands(M, F, jnp.bfloat16)
    rows, _, dots = quantized(*operands)
    alone, none, same = quantized(*operands, with_columns=False)
    assert none is None
    reference.assert_same_bits(alone.values, rows.values)
    reference.assert_same_bits(same, dots)


def test_columns_that_nobody_reads_are_not_computed():
    operands = cases.operands(M, F, jnp.bfloat16)
    for used, mode in (((0, 2), "row"), ((0, 1, 2), "row_column"), ((1,), "row_column")):
        run = lambda *x, used=used: [y for i, y in enumerate(quantized(*x)) if i in used]
        jaxpr = jax.make_jaxpr(run)(*operands).jaxpr
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        names = [eqn for eqn in jaxpr.eqns if "weighted_swiglu" in eqn.primitive.name]
        assert [eqn.params["mode"] for eqn in names] == [mode]


def test_vmap():
    operands = [np.stack(x) for x in zip(*[cases.operands(M, F, jnp.bfloat16)] * 2, strict=True)]
    operands[2][1] *= 2
    mapped = jax.vmap(quantized)(*map(jnp.asarray, operands))
    for i in range(2):
        expected = quantized(*(x[i] for x in operands))
        jax.tree.map(lambda x, y, i=i: reference.assert_same_bits(x[i], y), mapped, expected)


@pytest.mark.parametrize("m, f", [(0, 6), (5, 0)])
def test_nothing(m, f):
    gate_up, dh = np.zeros((m, 2 * f), np.float32), np.zeros((m, f), np.float32)
    rows, columns, dots = quantized(gate_up, dh, np.ones(m, np.float32))
    assert (rows.shape, columns.shape[0], dots.shape) == ((m, 2 * f), 2 * f, (m,))
    assert not dots.any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(gate_up=np.ones(6, np.float32)), ValueError, r"gate_up must be \(m, 2 f\); got"),
        (
            dict(gate_up=np.ones((2, 5), np.float32)),
            ValueError,
            r"\(m, 2 f\); got gate_up f32\[2,5",
        ),
        (dict(gate_up=np.ones((2, 6), np.float16)), TypeError, "gate_up must be bf16 or f32; got"),
        (dict(dh=np.ones((2, 6), np.float32)), ValueError, r"dh must be f32\[2,3\]; got f32\[2,6"),
        (
            dict(weights=np.ones((2, 1), np.float32)),
            ValueError,
            r"weighted_swiglu_grad_quantize: weights must be f32\[2\]; got f32\[2,1\]",
        ),
        (dict(weights=np.ones(2, np.int32)), ValueError, r"weights must be f32\[2\]; got s32\[2\]"),
    ],
)
def test_bad_operands_raise(change, error, message):
    operands = dict(
        gate_up=np.ones((2, 6), np.float32),
        dh=np.ones((2, 3), np.float32),
        weights=np.ones(2, np.float32),
    )
    with raises(error, match=message):
        quantized(**operands | change)


@pytest.mark.parametrize("with_columns", [False, True])
def test_it_is_one_custom_call_on_cuda(with_columns):
    operands = cases.operands(M, F, jnp.bfloat16)
    function = lambda *x: quantized(*x, with_columns=with_columns)
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    ((target, line),) = re.findall(r"custom_call @(jax_fp8gemm_\w+)\((.*)", text)
    assert target == "jax_fp8gemm_weighted_swiglu_grad_quantize"
    config = {name: int(value) for name, value in re.findall(r"(\w+) = (\d) : i32", line)}
    wanted = dict(mode=2 if with_columns else 0, ragged=1, source=5)
    assert {name: config[name] for name in wanted} == wanted
    layouts = ["1, 0", "0, 1"] * (1 + with_columns) + ["1, 0"]
    layouts = [f"dense<[{x}]> : tensor<2xindex>" for x in layouts]
    assert f"result_layouts = [{', '.join(layouts)}]" in line


@on_cpu
def test_the_kernel_is_refused_on_cpu():
    with raises(Exception, match="implementation"):
        quantized(*cases.operands(8, 8, jnp.bfloat16), implementation="cuda")
