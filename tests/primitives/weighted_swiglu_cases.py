"""The operands of the weighted gradient of SwiGLU, and its dots in float64."""

import gated_activations
import jax.numpy as jnp
import numpy as np

from jax_fp8gemm._primitives import weighted_swiglu_grad as op

# Of a dot, relative to the sum of the magnitudes of its terms: h 1e-6 for "silu" and 5e-6 for the
# others (test_activations_gpu.py), and 12 roundings of 6e-8.
DOT_ERROR = {True: 2e-6, False: 6e-6}


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def operands(m, f, dtype):
    """gate_up, dh and weights; one weight is 0."""
    weights = np.abs(normal(m, np.float32, 2))
    weights[m // 2] = 0
    gate_up = normal((m, 2 * f), dtype) * np.dtype(dtype).type(3)
    return gate_up, normal((m, f), dtype, 1), weights


def weighted(dh, weights):
    """dh times the weights of its rows, rounded to the dtype of dh."""
    return (dh.astype(np.float32) * weights[:, None]).astype(dh.dtype)


def groups(sizes, first_row):
    return jnp.asarray(sizes, jnp.int32), jnp.full((1,), first_row, jnp.int32)


def partial_dots(operands, of_groups, implementation, activation="silu", mode="row"):
    """(f / 128, m): the dots as the primitive returns them."""
    how = dict(e5m2=False, pow2_scale=False, activation=activation, implementation=implementation)
    arrays = *map(jnp.asarray, operands), *of_groups
    return np.asarray(op.weighted_swiglu_grad_quantize_p(*arrays, mode=mode, **how)[-1])


def _in_blocks(products):
    padded = np.pad(products, ((0, 0), (0, -products.shape[1] % 128)))
    return padded.reshape(len(products), padded.shape[1] // 128, 128).sum(axis=2).T


def assert_dots(dots, gate_up, dh, activation="silu", rows=slice(None)):
    """Of these rows, (f / 128, m) dots are the sums of float64 up to DOT_ERROR."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    products = gated_activations.gated(gate, up, activation) * dh.astype(np.float64)
    error = np.abs(dots - _in_blocks(products))
    bound = DOT_ERROR[activation == "silu"] * _in_blocks(np.abs(products))
    assert np.all((error <= bound)[:, rows])
    assert np.any(error[:, rows] > 0)  # f32 sums
