"""The kernels of gated activations other than SwiGLU: nearest FP8 values to float64, same bits."""

import gpu_cases
import jax.numpy as jnp
import numpy as np
import pytest
import swiglu_cases
from gated_activations import NAMES, OTHERS, truth
from gpu_cases import E4M3, E5M2, assert_same
from test_swiglu_gpu import (
    EDGES,
    FIRST_ROW,
    _assert_same_rows,
    _is_of_group,
    _of_groups,
    _operands,
    _quantize,
)

from jax_fp8gemm._primitives import swiglu_quantize

pytestmark = pytest.mark.gpu

activations = pytest.mark.parametrize("activation", OTHERS, ids=NAMES)
directions = pytest.mark.parametrize("is_grad", (False, True), ids=("h", "grad"))
# Of activation.cuh: 2^-18, and five roundings more. The magnitudes of `truth` are four times as
# large in the tails of gelu and gelu_tanh, where activation.cuh says 2^-16.
ELEMENT_ERROR = 5e-6


@activations
@directions
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("f", (384, 136, 77))  # rows aligned for both, for h only, for neither
@pytest.mark.parametrize("fmt,pow2", ((E4M3, False), (E5M2, True)), ids=("e4m3", "e5m2_pow2"))
def test_values_are_the_nearest_to_float64(activation, is_grad, dtype, f, fmt, pow2):
    operands = _operands(is_grad, f, dtype)
    x, magnitude = truth(operands, activation)
    rows, columns = _quantize(operands, EDGES, fmt, pow2, activation=activation)
    check = lambda q, x, magnitude, what: swiglu_cases.assert_nearest(
        q, x, magnitude, fmt, pow2, what, ELEMENT_ERROR
    )
    is_of_group = _is_of_group(EDGES)
    check(_of_groups(rows, EDGES), x[is_of_group], magnitude[is_of_group], "rows")
    in_columns, is_token = swiglu_cases.in_columns(x, EDGES, FIRST_ROW)
    check(columns, in_columns, swiglu_cases.in_columns(magnitude, EDGES, FIRST_ROW)[0], "columns")
    assert not np.asarray(columns.values).view(np.uint8)[:, ~is_token].any()


@activations
@directions
@pytest.mark.parametrize("f,dtype", ((200, jnp.bfloat16), (77, jnp.float32)))
def test_modes_give_the_same_bits(activation, is_grad, f, dtype):
    operands = _operands(is_grad, f, dtype)
    rows, columns = _quantize(operands, EDGES, activation=activation)
    alone, _ = _quantize(operands, EDGES, with_columns=False, activation=activation)
    _assert_same_rows(alone, rows, EDGES)
    name = "swiglu_grad_quantize_p" if is_grad else "swiglu_quantize_p"
    values, scale = getattr(swiglu_quantize, name)(
        *map(jnp.asarray, operands),
        jnp.asarray(EDGES, jnp.int32),
        jnp.full((1,), FIRST_ROW, jnp.int32),
        mode="column",
        pieces=1,
        e5m2=False,
        pow2_scale=False,
        activation=activation,
        implementation=gpu_cases.IMPLEMENTATION,
    )
    assert_same(values, columns.values)
    assert_same(scale, columns.scale)


@activations
@directions
def test_a_nan_spoils_its_blocks_alone(activation, is_grad):
    operands = [x.copy() for x in _operands(is_grad, 384, jnp.bfloat16)]
    operands[0][50, 3] = 1
    operands[0][100, 3] = operands[0][50, 384 + 3] = np.nan
    rows, _ = _quantize(operands, EDGES, activation=activation)
    is_nan = np.isnan(_of_groups(rows, EDGES).scale)
    assert set(FIRST_ROW + np.flatnonzero(is_nan.any(axis=1))) == {50, 100}
    assert not is_nan[:, 1:3].any()
