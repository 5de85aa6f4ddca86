"""What the tests of ragged_dot and ragged_dot_general share: operands, float64 truth, programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from jax.lax import RaggedDotDimensionNumbers
from matmul_cases import random

from jax_fp8gemm import DEEPSEEK_V3, ragged_dot, ragged_dot_general

M, N, K = 300, 136, 260  # all ragged
SIZES = (70, 0, 130, 40)  # an empty group; 60 rows of no group
G, TOTAL = len(SIZES), sum(SIZES)


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
