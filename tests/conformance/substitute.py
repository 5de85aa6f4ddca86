"""Our products under the names that other projects' tests call.

A namespace stands in for a module: `substitute(module)` replaces the variables `lax`, `jnp`, `jax`
of a test module, so what JAX itself calls stays JAX's. The recipe's scales are powers of two: what
has at most four significant bits, and is within 2^15 of its block's largest value, is then exact.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_fp8gemm as fp8

EXACT = dataclasses.replace(fp8.DEEPSEEK_V3, pow2_scale=True)
# How often ours were called: a case that calls none says nothing of them.
calls = 0


# Whether products of integers go through f32: for suites that are not about dtypes.
takes_integers = False


def _ours(function):
    """`function` with the exact recipe, counted."""

    @functools.wraps(function)
    def counted(lhs, rhs, *args, preferred_element_type=None, **kwargs):
        global calls
        calls += 1
        product = functools.partial(function, recipe=EXACT, **kwargs)
        if takes_integers and all(map(_is_integer, (lhs, rhs))):
            dtype = preferred_element_type or jnp.result_type(lhs, rhs)
            as_f32 = (jnp.asarray(x).astype(jnp.float32) for x in (lhs, rhs))
            return product(*as_f32, *args).astype(dtype)
        return product(lhs, rhs, *args, preferred_element_type=preferred_element_type)

    return counted


def _is_integer(x) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", None), jnp.integer)


dot_general = _ours(fp8.dot_general)
matmul = _ours(fp8.matmul)
ragged_dot = _ours(fp8.ragged_dot)
ragged_dot_general = _ours(fp8.ragged_dot_general)


def lax_dot(lhs, rhs, *, dimension_numbers=None, **kwargs):
    """lax.dot: the last dimension of lhs with the first of rhs, unless it says otherwise."""
    if dimension_numbers is None:
        dimension_numbers = (((np.ndim(lhs) - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, dimension_numbers, **kwargs)


def jnp_dot(a, b, **kwargs):
    """jnp.dot: the last dimension of a with the last but one of b."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return jnp.dot(a, b, **kwargs)
    contract = ((np.ndim(a) - 1,), (max(np.ndim(b) - 2, 0),))
    return dot_general(a, b, (contract, ((), ())), **kwargs)


def tensordot(a, b, axes=2, **kwargs):
    """jnp.tensordot, whose own errors are kept."""
    jax.eval_shape(functools.partial(jnp.tensordot, axes=axes, **kwargs), a, b)
    if np.ndim(axes) == 0:
        axes = range(np.ndim(a) - axes, np.ndim(a)), range(axes)
    contract = tuple(tuple(np.atleast_1d(x).tolist()) for x in axes)
    return dot_general(a, b, (contract, ((), ())), **kwargs)


def einsum(*operands, _dot_general=dot_general, **kwargs):
    """jnp.einsum with our dot_general inside; counted here, since einsum is jitted and cached."""
    global calls
    calls += 1
    return jnp.einsum(*operands, _dot_general=_dot_general, **kwargs)


class Namespace:
    """A module in which some names mean something else."""

    def __init__(self, module: Any, **names: Any):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


LAX = Namespace(
    lax,
    dot=lax_dot,
    dot_general=dot_general,
    ragged_dot=ragged_dot,
    ragged_dot_general=ragged_dot_general,
)
JNP_NAMES = dict(matmul=matmul, dot=jnp_dot, tensordot=tensordot, einsum=einsum)


def substitute(module: Any, makers: Any = lambda module: {}, with_ours: bool = True) -> None:
    """Replaces in `module` what its code finds as `lax`, `jnp`, `jax`, and by `from ... import`.

    makers(module) gives more names for jnp and np: the functions that make arrays.
    """
    numpy = Namespace(jnp, **(JNP_NAMES if with_ours else {}), **makers(jnp))
    ours_of_lax = LAX if with_ours else lax
    replaced = {
        id(jnp): numpy,
        id(np): Namespace(np, **makers(np)),
        id(lax): ours_of_lax,
        id(jax): Namespace(jax, lax=ours_of_lax, numpy=numpy),
    }
    if with_ours:
        replaced |= {id(lax.dot_general): dot_general, id(jnp.einsum): einsum}
    for name, value in list(vars(module).items()):
        if id(value) in replaced:
            setattr(module, name, replaced[id(value)])
        elif getattr(value, "__module__", None) == module.__name__:
            for function in [value, *vars(value).values()] if isinstance(value, type) else [value]:
                _substitute_defaults(function, replaced)


def _substitute_defaults(function: Any, replaced: dict[int, Any]) -> None:
    """Also what a function took as the default of an argument when it was defined."""
    if defaults := getattr(function, "__defaults__", None):
        function.__defaults__ = tuple(replaced.get(id(x), x) for x in defaults)
    if defaults := getattr(function, "__kwdefaults__", None):
        function.__kwdefaults__ = {name: replaced.get(id(x), x) for name, x in defaults.items()}


def substitute_operator() -> None:
    """`@` between arrays, eager or traced, is our matmul."""
    from jax._src import array, core

    reflected = lambda self, other: matmul(other, self)
    # Between traced arrays the operator looks for these names on their type.
    array.ArrayImpl.__matmul__ = matmul
    array.ArrayImpl.__rmatmul__ = reflected
    core.ShapedArray._matmul = staticmethod(matmul)
    core.ShapedArray._rmatmul = staticmethod(reflected)
