"""Gradients with wgrad_lhs_block=(128, 128): a mesh cuts squares nowhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm import Recipe, matmul, ragged_dot

RECIPE = Recipe(wgrad_lhs_block=(128, 128))
SIZES = jnp.asarray([100, 0, 130, 200], jnp.int32)


@functools.cache
def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


FUNCTIONS = {
    "matmul": (functools.partial(matmul, recipe=RECIPE), (4, 256, 512), (512, 256)),
    "ragged_dot": (
        lambda x, w: ragged_dot(x, w, SIZES, recipe=RECIPE),
        (512, 512),
        (4, 512, 256),
    ),
}


@functools.cache
def gradients(name):
    function, *_ = FUNCTIONS[name]
    return jax.jit(lambda x, w, dout: jax.vjp(function, x, w)[1](dout))


@functools.cache
def problem(name):
    """Operands, and their gradients on one device."""
    function, x_shape, w_shape = FUNCTIONS[name]
    x, w = random(*x_shape), random(*w_shape, seed=1)
    operands = x, w, random(*jax.eval_shape(function, x, w).shape, seed=2)
    return operands, gradients(name)(*operands)


@pytest.mark.parametrize(
    "name, x_spec, w_spec",
    [
        ("matmul", P("x"), P()),
        ("matmul", P("x", "y"), P("x", "y")),  # tokens twice; features of both sides
        ("matmul", P("x", None, "y"), P("y")),  # 256 features a device: two blocks
        ("ragged_dot", P("x", "y"), P(None, "y")),
        ("ragged_dot", P(("x", "y")), P("x", "y")),
    ],
)
def test_gradients_are_those_of_one_device(name, x_spec, w_spec):
    operands, expected = problem(name)
    devices = mesh(AxisType.Auto, AxisType.Auto, shape=(2, 2))
    put = lambda x, spec: jax.device_put(x, NamedSharding(devices, spec))
    x, w, dout = operands
    found = gradients(name)(put(x, x_spec), put(w, w_spec), dout)
    for actual, one in zip(found, expected, strict=True):
        # Sums of several devices are added in another order.
        np.testing.assert_allclose(actual, one, rtol=0, atol=2e-6 * np.abs(one).max())
