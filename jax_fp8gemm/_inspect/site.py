"""Where an equation of ours stands in a user's program: what its name stack says."""

from __future__ import annotations

import re
from typing import Any

from jax_fp8gemm._primitives import modes
from jax_fp8gemm._primitives.joint import APART

# Names of transformations in a name stack: jvp(...), transpose(jvp(...)), vmap(...).
_TRANSFORM = re.compile(r"\w+\(|\)")
_OWN = "fp8gemm_"
_RECOMPUTED = "rematted_computation"
PREFIX = "jax_fp8gemm_"
_COMPUTE_NOTHING = (PREFIX + "whole", PREFIX + "enter_auto_axes")


def is_ours(eqn: Any) -> bool:
    """Returns whether the equation is a quantisation or a product of this package."""
    return eqn.primitive.name.startswith(PREFIX) and eqn.primitive.name not in _COMPUTE_NOTHING


def is_quantisation(eqn: Any) -> bool:
    return is_ours(eqn) and "quantize" in eqn.primitive.name


def has_parts(eqn: Any) -> bool:
    """Returns whether the equation stands for several ones of this package, which quantise too."""
    return eqn.primitive.name in APART


def join(stack: str, eqn: Any) -> str:
    """Returns the name stack of an equation in a jaxpr whose own name stack is `stack`."""
    return f"{stack}/{eqn.source_info.name_stack}".strip("/")


def path_and_op(stack: str, eqn: Any) -> tuple[str, str]:
    """Returns the user's part of the name stack, and the op of ours that the user called."""
    names = [name for name in _TRANSFORM.sub("", stack).split("/") if name]
    own = [name.removeprefix(_OWN) for name in names if name.startswith(_OWN)]
    first = next((i for i, name in enumerate(names) if name.startswith(_OWN)), len(names))
    # jnp.einsum names a scope by its equation.
    user = [name for name in names[:first] if name != _RECOMPUTED and "->" not in name]
    return "/".join(user), own[0] if own else eqn.primitive.name.removeprefix(PREFIX)


def pass_of(stack: str) -> str:
    """Returns "forward", "recomputed" (by jax.checkpoint) or "backward"."""
    if _RECOMPUTED in stack:
        return "recomputed"
    return "backward" if "transpose(" in stack else "forward"


def operand_of(stack: str, eqn: Any) -> str:
    """Returns which operand a quantisation makes: "lhs", "rhs", "dout", or "x" if a user calls it.

    Squares are made of weights. Without squares, a backward pass quantises cotangents, but for what
    it computes again: an activation, or FP8 tokens that it requantises. Rows that it weights on the
    way are cotangents too.
    """
    name, mode = eqn.primitive.name.removeprefix(PREFIX), eqn.params["mode"]
    _, op = path_and_op(stack, eqn)
    if name in ("swiglu_grad_quantize", "weighted_swiglu_grad_quantize"):
        return "dout"
    if op == name:
        return "x"
    if name == "quantize" and mode in modes.SQUARE:
        return "rhs"
    is_fp8 = eqn.invars[0].aval.dtype.itemsize == 1 and not eqn.params.get("is_weighted")
    is_again = name == "swiglu_quantize" or is_fp8
    return "dout" if pass_of(stack) == "backward" and not is_again else "lhs"
