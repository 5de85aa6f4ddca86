"""reverse_mode: what an op says where it is differentiated in any other mode.

JAX's own errors name custom_vjp, or a primitive of JAX. Two identities say more. `_marker` is put
on operands and results of an op, and gives each tangent a `_tangent`. Reverse mode transposes the
latter and never computes it; forward mode would. Neither leaves anything in a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fp8gemm._data import formats


def reverse_mode(op: str, function: Callable[..., Any], *operands: Any) -> Any:
    """function(*operands), a jax.custom_vjp, with sentences of `op` for other derivatives.

    NOTE: `function` must keep none of its operands for the backward pass. A marked one that is not
    differentiated would be a copy, where a function is jitted and its gradient is not.
    """
    return transposable_by_none(op, function(*_mark(op, operands)))


def transposable_by_none(op: str, out: Any) -> Any:
    """`out` of `op`, with its sentence for jax.linear_transpose."""
    return _mark(op, out)


def _mark(op: str, tree: Any) -> Any:
    is_marked = lambda x: any(x.dtype == dtype for dtype in formats.FLOAT_DTYPES)
    return jax.tree.map(lambda x: _marker.bind(x, op=op) if is_marked(x) else x, tree)


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


def undifferentiable(x: jax.Array, message: str) -> jax.Array:
    """`x`; raises TypeError(message) where it is differentiated."""
    return _undifferentiable_p.bind(x, message=message)


def _raise_undifferentiable(primals, tangents, *, message):
    raise TypeError(message)


_undifferentiable_p = Primitive("undifferentiable")
_undifferentiable_p.def_abstract_eval(lambda x, *, message: x)
_undifferentiable_p.def_impl(lambda x, *, message: x)
mlir.register_lowering(_undifferentiable_p, lambda ctx, x, *, message: [x])
batching.defvectorized(_undifferentiable_p)
ad.primitive_jvps[_undifferentiable_p] = _raise_undifferentiable
