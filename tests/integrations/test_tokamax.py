"""jax_fp8gemm.tokamax: what tokamax calls, and tokamax's own call of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.lax import RaggedDotDimensionNumbers

import jax_fp8gemm as fp8
from jax_fp8gemm.tokamax import ragged_dot

LHS = jax.random.normal(jax.random.key(0), (12, 32), jnp.bfloat16)
RHS = jax.random.normal(jax.random.key(1), (2, 32, 16), jnp.bfloat16)
SIZES = jnp.asarray([5, 4])
DIMS = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
ARGS = dict(group_sizes=SIZES, ragged_dot_dimension_numbers=DIMS)


def test_activation_of_the_f32_result():
    product = fp8.ragged_dot(LHS, RHS, SIZES, preferred_element_type=jnp.float32)
    found = ragged_dot(LHS, RHS, **ARGS, activation=jax.nn.relu)
    np.testing.assert_array_equal(found, jax.nn.relu(product).astype(jnp.bfloat16))


def test_what_the_next_implementation_is_to_take():
    with raises(NotImplementedError, match=r"arguments must be known; got \['fuse_gateup"):
        ragged_dot(LHS, RHS, **ARGS, fuse_gateup_activation="silu")


def test_called_by_tokamax():
    tokamax = pytest.importorskip(
        "tokamax", reason="tokamax is installed with the extra `conformance`"
    )
    found = tokamax.ragged_dot(LHS, RHS, SIZES, implementation=[ragged_dot])
    np.testing.assert_array_equal(found, fp8.ragged_dot(LHS, RHS, SIZES))
