"""reverse_mode: raises a helpful error where an op is not differentiated in reverse mode.

JAX's own errors name custom_vjp, or a primitive of JAX. Two primitives that return their operand
raise better ones. `_marker` is applied to operands and results of an op; its derivative applies
`_tangent` to the tangent. Reverse mode transposes `_tangent` and never computes it. Forward mode
would compute it, and gets the error. `_refusing_p` and `_undifferentiable_p` raise where what they
stand for is differentiated at all. None of the four leaves anything in a compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fp8gemm._data import formats
from jax_fp8gemm._data.scaled_array import ScaledArray


def reverse_mode(op: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Calls `function`, a jax.custom_vjp. Other derivatives raise errors that name `op`.

    NOTE: of its operands `function` must keep none for the backward pass but ScaledArrays, which
    are not marked. If a function is jitted and its gradient is not, a marked operand that is kept
    would be a copy.
    """
    return transposable_by_none(op, function(*_mark(op, operands)))


def transposable_by_none(op: str, out: Any) -> Any:
    """Returns `out`, a result of `op`. Its jax.linear_transpose raises an error that names `op`."""
    return _mark(op, out)


def _mark(op: str, tree: Any) -> Any:
    # What is quantised already is kept for the backward pass as it is.
    is_kept = lambda x: isinstance(x, ScaledArray)
    is_marked = lambda x: not is_kept(x) and x.dtype in formats.FLOAT_DTYPES
    mark = lambda x: _marker.bind(x, op=op) if is_marked(x) else x
    return jax.tree.map(mark, tree, is_leaf=is_kept)


def _jvp(primals, tangents, *, op: str):
    (x,), (tangent,) = primals, tangents
    return x, tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent, op=op)


def _raise(op: str, got: str) -> NoReturn:
    raise NotImplementedError(
        f"{op}: must be differentiated in reverse mode; got {got}. Use jax.grad, jax.vjp or "
        "jax.jacrev."
    )


def _raise_transposed(cotangent, x, *, op: str) -> NoReturn:
    _raise(op, "jax.linear_transpose")


def _raise_forward(*_, op: str) -> NoReturn:
    _raise(op, "forward mode (jax.jvp, jax.jacfwd, jax.linearize)")


def _identity(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *, op: x)
    batching.defvectorized(primitive)
    return primitive


_marker = _identity("fp8gemm_reverse_mode")
_marker.def_impl(lambda x, *, op: x)
mlir.register_lowering(_marker, lambda ctx, x, *, op: [x])
ad.primitive_jvps[_marker] = _jvp
ad.primitive_transposes[_marker] = _raise_transposed

_tangent = _identity("fp8gemm_reverse_mode_tangent")
_tangent.def_impl(_raise_forward)
mlir.register_lowering(_tangent, _raise_forward)
ad.deflinear2(_tangent, lambda cotangent, x, *, op: [cotangent])


def refusing(x: jax.Array, tree: Any, message: str) -> jax.Array:
    """Returns `x`. Differentiating an array of `tree` then raises TypeError(message).

    The arrays of `tree` stay what they are. A scan over layers would take what another operation
    returns for a new array, and stack it where a backward pass reads it.
    """
    return _refusing_p.bind(x, *jax.tree.leaves(tree), message=message)


def only_once(op: str, *operands: Any) -> Any:
    """Returns the operands of a backward pass, whose derivative raises an error that names `op`.

    Integer arithmetic has the derivative zero, so a second derivative would be wrong silently.
    """
    message = f"{op}: is differentiable once, in reverse mode. Take no gradient of a gradient."
    how = dict(message=message, error=NotImplementedError)
    return tuple(_undifferentiable_p.bind(x, **how) for x in operands)


def _raise_undifferentiable(primals, tangents, *, message, error):
    raise error(message)


def _refusing_jvp(primals, tangents, *, message):
    (x, *arrays), (tangent, *of_arrays) = primals, tangents
    if not all(isinstance(t, ad.Zero) for t in of_arrays):
        raise TypeError(message)
    return _refusing_p.bind(x, *arrays, message=message), tangent


_refusing_p = Primitive("refusing")
_refusing_p.def_abstract_eval(lambda x, *arrays, **how: x)
_refusing_p.def_impl(lambda x, *arrays, **how: x)
mlir.register_lowering(_refusing_p, lambda ctx, x, *arrays, **how: [x])
batching.primitive_batchers[_refusing_p] = lambda operands, dims, **how: (
    _refusing_p.bind(*operands, **how),
    dims[0],
)
ad.primitive_jvps[_refusing_p] = _refusing_jvp

_undifferentiable_p = Primitive("undifferentiable")
_undifferentiable_p.def_abstract_eval(lambda x, **how: x)
_undifferentiable_p.def_impl(lambda x, **how: x)
mlir.register_lowering(_undifferentiable_p, lambda ctx, x, **how: [x])
batching.defvectorized(_undifferentiable_p)
ad.primitive_jvps[_undifferentiable_p] = _raise_undifferentiable
