"""Operands whose place a result takes: the kernel adds to what it finds there."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax


def with_own_buffers(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the operands such that XLA hands each over in a buffer that the result can have.

    NOTE: where an operand is a slice of a stack, as in a scan, XLA has a custom call read it there,
    and write its result elsewhere, whatever takes the place of what. The kernel refuses that.
    Behind a barrier XLA copies the slice.
    """
    return [lax.optimization_barrier(x) for x in operands]
