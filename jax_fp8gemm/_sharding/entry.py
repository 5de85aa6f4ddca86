"""enter: the way of operands into jax.sharding.auto_axes, as one equation.

An eager gradient of a scan takes out of the loop what no step changes. JAX refuses values whose
types are on the Auto mesh there ("mesh should be the same across the entire program"). An operand
that no step changes is taken out in front of the equation of `enter`, with its Explicit type.
"""

# JAX leaves the interface of primitives untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_identity = Primitive("jax_fp8gemm_enter_auto_axes")
_identity.multiple_results = True


def enter(operands: Sequence[object]) -> Sequence[object]:
    """Returns the operands, pytrees, whose arrays are results of one equation.

    The compiled program has no instruction for it.
    """
    arrays, structure = jax.tree.flatten(list(operands))
    return jax.tree.unflatten(structure, _bind(arrays))


def _bind(arrays: Sequence[Any]) -> list[Any]:
    return cast(list[Any], _identity.bind(*arrays))


@_identity.def_impl
@_identity.def_abstract_eval
def _same(*arrays: Any) -> list[Any]:
    return list(arrays)


def _lower(ctx: Any, *values: Any) -> Sequence[Any]:
    return values


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _bind(primals), tangents


def _batch(arrays: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    return _bind(arrays), dims


mlir.register_lowering(_identity, _lower)
ad.primitive_jvps[_identity] = _jvp
batching.primitive_batchers[_identity] = _batch
