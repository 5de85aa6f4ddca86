"""Methods of the classes of this layer whose functions are those of modules above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_functions: dict[str, Callable[..., Any]] = {}


def define_method(function: Callable[..., Any]) -> None:
    """Makes `function` that of the methods which look it up by its name."""
    _functions[function.__name__] = function


def method(name: str) -> Callable[..., Any]:
    """Returns the function of this name, which the whole package has defined once imported."""
    return _functions[name]
