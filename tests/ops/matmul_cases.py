"""What the tests of matmul share, some of it with those of ragged products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jax_fp8gemm import DEEPSEEK_V3, HYBRID, Recipe, matmul
from jax_fp8gemm._data import checks

M, N, K = 70, 136, 300  # all ragged

# Each recipe, and what it means to the functions of reference.py.
RECIPES = {
    "deepseek_v3": (DEEPSEEK_V3, {}),
    "hybrid": (HYBRID, dict(bwd=jnp.float8_e5m2)),
    "pow2": (Recipe(pow2_scale=True), dict(pow2=True)),
    "wgrad_bf16": (Recipe(wgrad="bf16"), dict(fp8_drhs=False)),
    "square_lhs": (Recipe(wgrad_lhs_block=(128, 128)), dict(drhs_lhs_block=(128, 128))),
    "e5m2": (Recipe(fwd="e5m2", bwd="e5m2"), dict(fwd=jnp.float8_e5m2, bwd=jnp.float8_e5m2)),
}


@functools.cache
def random(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def problem(dtype=jnp.float32):
    """lhs (m, k), rhs (k, n), dout (m, n)."""
    return random(M, K, dtype=dtype), random(K, N, dtype=dtype, seed=1), random(M, N, dtype=dtype)


def vjp(lhs, rhs, dout, **kwargs):
    out, pullback = jax.vjp(functools.partial(matmul, **kwargs), lhs, rhs)
    return out, *pullback(dout)


def equations(function, *args):
    """Our primitives that a jitted `function` is left with, in order; quantisation by mode."""
    found = []
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith("jax_fp8gemm"):
            found.append(eqn.params.get("mode") or family(eqn.params))
    return found


def family(params):
    """The kernel family of a dense product."""
    return "1d1d" if params["is_1d1d"] else "2d1d" if params["is_2d1d"] else "1d2d"


def saved_residuals(function, *args):
    """Types of the floats that jax.vjp keeps, arguments aside."""
    types = []

    def trace(*args):
        _, pullback = jax.vjp(function, *args)
        leaves = [x for x in jax.tree.leaves(pullback) if hasattr(x, "shape")]
        types.extend(checks.short_type(x) for x in leaves if all(x is not arg for arg in args))

    jax.eval_shape(trace, *args)
    return sorted(t for t in types if not t.startswith("s32"))
