"""What the tests of ragged_dot and ragged_dot_general share: operands, float64 truth, programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from jax.lax import RaggedDotDimensionNumbers

from jax_fp8gemm import DEEPSEEK_V3, HYBRID, Recipe, _checks, ragged_dot, ragged_dot_general

# f32 sums, then the rounding to the dtype; relative to the largest entry.
TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-10}
M, N, K = 300, 136, 260  # all ragged
SIZES = (70, 0, 130, 40)  # an empty group; 60 rows of no group
G, TOTAL = len(SIZES), sum(SIZES)

# Each recipe, and what it means to the functions of reference.py.
RECIPES = {
    "deepseek_v3": (DEEPSEEK_V3, {}),
    "hybrid": (HYBRID, dict(bwd=jnp.float8_e5m2)),
    "pow2": (Recipe(pow2_scale=True), dict(pow2=True)),
    "wgrad_bf16": (Recipe(wgrad="bf16"), dict(fp8_drhs=False)),
    "e5m2": (Recipe(fwd="e5m2", bwd="e5m2"), dict(fwd=jnp.float8_e5m2, bwd=jnp.float8_e5m2)),
}


def assert_close(x, expected, dtype):
    assert x.dtype == dtype and x.shape == expected.shape
    bound = TOLERANCE[dtype] * np.abs(expected).max(initial=0)
    np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=0, atol=bound)


def assert_all_close(found, expected, dtype=jnp.float32):
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, dtype)


def assert_all_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        reference.assert_same_bits(x, y)


@functools.cache
def random(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def int32(sizes):
    return jnp.asarray(sizes, jnp.int32)


def numbers(contract, ragged, groups=(), batch=((), ())):
    return RaggedDotDimensionNumbers((contract, batch), ragged, groups)


ROWS = numbers(((1,), (1,)), [0], [0])  # (m, k), (g, k, n) -> (m, n)
CONTRACTION = numbers(((0,), (0,)), [0])  # (m, k), (m, n) -> (g, k, n)
contraction = functools.partial(ragged_dot_general, ragged_dot_dimension_numbers=CONTRACTION)


def problem(dtype=jnp.float32, m=M, g=G):
    """lhs (m, k), rhs (g, k, n), dout (m, n)."""
    lhs, rhs = random(m, K, dtype=dtype), random(g, K, N, dtype=dtype, seed=1)
    return lhs, rhs, random(m, N, dtype=dtype, seed=2)


def contraction_problem(dtype=jnp.float32, m=M, g=G):
    """lhs (m, k), rhs (m, n), dout (g, k, n)."""
    lhs, rhs = random(m, K, dtype=dtype), random(m, N, dtype=dtype, seed=1)
    return lhs, rhs, random(g, K, N, dtype=dtype, seed=2)


def vjp(lhs, rhs, sizes, dout, offset=None, **kwargs):
    """(out, dlhs, drhs) of ragged_dot."""
    product = functools.partial(ragged_dot, group_sizes=sizes, group_offset=offset, **kwargs)
    out, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs), lhs, rhs)
    return out, *pullback(dout)


def jitted(recipe=DEEPSEEK_V3, **kwargs):
    return _jitted(recipe=recipe, **kwargs)


@functools.cache
def _jitted(**kwargs):
    return jax.jit(functools.partial(vjp, **kwargs))


def truth(lhs, rhs, sizes, dout, offset=0, **kwargs):
    """(out, dlhs, drhs) in float64: those of each group alone, zero in rows of no group."""
    lhs, rhs, dout = map(np.asarray, (lhs, rhs, dout))
    results = [np.zeros(x.shape) for x in (dout, lhs, rhs)]
    ranges = reference.row_ranges(sizes, lhs.shape[0])[offset:][: len(rhs)]
    for i, (start, end) in enumerate(ranges):
        rows = slice(start, end)
        group = reference.matmul_vjp(lhs[rows], rhs[i], dout[rows], **kwargs)
        results[0][rows], results[1][rows], results[2][i] = group
    return results


def equations(function, *args):
    """Our primitives that a jitted `function` is left with, in order; quantisation by mode."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return _equations(jaxpr)


def _equations(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removeprefix("jax_fp8gemm_")
        if name == "quantize_ragged":
            modes = {"row": "row", "column": "columns", "row_column": "rows and columns"}
            found.append(modes[eqn.params["mode"]])
        elif name != eqn.primitive.name:
            found.append(eqn.params.get("mode", name))
        for inner in jaxprs_in_params(eqn.params):
            found += _equations(inner)
    return found


def saved_residuals(function, *args):
    """Types of the floats that jax.vjp keeps, arguments aside."""
    types = []

    def trace(*args):
        _, pullback = jax.vjp(function, *args)
        leaves = [x for x in jax.tree.leaves(pullback) if hasattr(x, "shape")]
        types.extend(_checks.short_type(x) for x in leaves if all(x is not arg for arg in args))

    jax.eval_shape(trace, *args)
    return sorted(t for t in types if not t.startswith("s32"))


def mesh(axis_type):
    # conftest makes four CPU devices: this skips only on a machine of fewer GPUs.
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
