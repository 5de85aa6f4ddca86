"""Whether the kernels can run on this machine, and what happens where they cannot."""

from __future__ import annotations

import jax

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._runtime import extension


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def unusable_reason() -> str | None:
    """Returns why the kernel cannot run here, or None.

    None also means that this machine has no GPU, and lowers for another machine.
    """
    return extension.unavailable_reason() if _has_gpu() else None


def fall_back(op: str, implementation: Implementation, reason: str) -> None:
    """Warns, once for each reason, that the reference runs; implementation="cuda" raises."""
    if implementation == "cuda":
        raise RuntimeError(
            f"{op}: implementation='cuda' must be lowered for a GPU that runs the kernels; "
            f"got: {reason}. Use None or 'xla'."
        )
    extension.warn_once(reason)
