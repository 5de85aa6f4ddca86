"""What the package takes from JAX beyond its documented API, which a release may change.

If a name of _NEEDED is gone, the import of the package fails with a sentence. Code that can do
without a name gets it from `optional`.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

_TESTED = "0.10.2 to 0.12.0.1"
_NEEDED = (
    "jax.core.ShapedArray.manual_axis_type",
    "jax.experimental.custom_partitioning.custom_partitioning",
    "jax.experimental.xla_metadata.set_xla_metadata",
    "jax.extend.core.Primitive",
    "jax.interpreters.ad.primitive_jvps",
    "jax.interpreters.batching.defvectorized",
    "jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir.lower_fun",
    "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.partial_eval.dce_jaxpr",
    "jax.interpreters.partial_eval.dce_rules",
    "jax.interpreters.xla.apply_primitive",
)


def optional(path: str, default: Any = None) -> Any:
    """Returns what `path` names, an attribute of a module of JAX, or `default` where it is gone."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for i, name in enumerate(parts[1:], start=2):
        if not hasattr(found, name):
            try:  # a module is an attribute of its package only once it is imported
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return default
        found = getattr(found, name, default)
    return found


def unsupported(what: str) -> str:
    """Returns the sentence that says of `what` that this JAX cannot do it."""
    return (
        f"{what}; got jax {jax.__version__}. The package is tested with jax {_TESTED}: install "
        "one of these, or a newer jax_fp8gemm."
    )


def needed(module: str, path: str) -> Any:
    """Returns what `path` names for `module`, an optional one, or raises where it is gone."""
    if (found := optional(path)) is None:
        raise ImportError(unsupported(f"{module}: jax must have {path}"))
    return found


def _check() -> None:
    if gone := [path for path in _NEEDED if optional(path) is None]:
        raise ImportError(unsupported(f"jax_fp8gemm: jax must have {', '.join(gone)}"))


_check()
