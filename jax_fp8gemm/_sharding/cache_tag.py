"""tag: writes into a program what a partitioned op in it compiles to.

JAX's compilation cache finds a program by its text. In that text an op that XLA partitions is a
callback into Python, known by the address of the callback alone. The text tells neither the
parameters of the op nor the code that partitions it and runs on the shards. If the address is left
out (jax_remove_custom_partitioning_ptr_from_cache_key), or reused, the cache returns the program of
another op on arrays of the same types. So the call carries a digest of both. XLA ignores it.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
from jax.experimental.xla_metadata import (
    set_xla_metadata,  # pyright: ignore[reportUnknownVariableType]  # JAX leaves it untyped
)

ATTRIBUTE = "jax_fp8gemm_digest"


def tag(results: Sequence[jax.Array], *what: object) -> Sequence[jax.Array]:
    """Returns `results` of an op, made by an instruction that carries a digest of `what`."""
    text = repr(what)
    assert " at 0x" not in text, f"another in each process: {text}"
    digest = hashlib.sha256(_sources_digest() + text.encode()).hexdigest()
    return cast(Sequence[jax.Array], set_xla_metadata(results, **{ATTRIBUTE: digest}))


@functools.cache
def _sources_digest() -> bytes:
    """Returns a digest of the package's code, so that no cached program outlives a change of it."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in _sources())).digest()


def _sources() -> list[Path]:
    """Returns every Python file of the package, in all its folders."""
    return sorted(Path(__file__).parents[1].rglob("*.py"))
