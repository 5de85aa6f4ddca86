"""Warnings that point at the line of the user's program, not at one of JAX or of this package."""

import sys
import warnings
from types import FrameType

# What stands between that line and an op: transformations, modules, checkers of annotations.
_LIBRARIES = {"jax", "jaxlib", "jax_fp8gemm", "flax", "qwix", "jaxtyping", "beartype", "contextlib"}


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns at the innermost line that none of these libraries holds.

    Under jit that is the call of the compiled function, because warnings are given when lowering.
    """
    frame = _caller(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )


def _caller(frame: FrameType) -> FrameType:
    """Returns the frame of that line, or the outermost one where a library began the thread."""
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame
