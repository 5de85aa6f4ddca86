"""pytest.raises for errors of the package itself, not of the annotations that tests check."""

import contextlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager

import jax
import pytest

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="only where the kernels cannot run does cuda raise"
)


@contextlib.contextmanager
def raises(error: type[Exception], match: str) -> Iterator[None]:
    """As pytest.raises, with jaxtyping's checks off: users do not have them."""
    with without_annotation_checks(), pytest.raises(error, match=match):
        yield


def raises_without_kernel(op: str) -> AbstractContextManager[None]:
    """`raises` for implementation="cuda" on a CPU."""
    message = f"{op}: implementation='cuda' must be lowered for a GPU .* got: lowering for cpu"
    return raises(RuntimeError, match=message)


@contextlib.contextmanager
def without_annotation_checks() -> Iterator[None]:
    """With jaxtyping's checks off: annotations name arrays alone, of all that ops take for one."""
    if not importlib.util.find_spec("jaxtyping"):
        yield
        return
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)
