"""Forced: a choice that tests and benchmarks can make in the place of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Forced(Generic[T]):
    """What a context forces on all that is traced and lowered within it."""

    def __init__(self) -> None:
        self._values: list[T] = []

    @property
    def value(self) -> T | None:
        """What the innermost context forces. None outside of all."""
        return self._values[-1] if self._values else None

    @contextlib.contextmanager
    def __call__(self, value: T) -> Iterator[None]:
        self._values.append(value)
        try:
            yield
        finally:
            self._values.pop()
