"""name_scopes: names the modules of a model in Flax NNX for stats, explain and profiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx


def scoped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module's __call__ under jax.named_scope of the name that name_scopes gave it."""

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with scope_of(self):
            return call(self, *args, **kwargs)

    return run


def scope_of(module: nnx.Module) -> AbstractContextManager[Any]:
    """Returns the jax.named_scope of a module's name, or a context of no name."""
    scope = getattr(module, "fp8_scope", "")
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def name_scopes(model: nnx.Module) -> None:
    """Names this package's modules in `model` by their paths, such as "blocks/0/mlp", in place.

    Each then computes under jax.named_scope of its path, which `stats.collect`, `explain`, profiles
    and the metadata of HLO show. Linen names modules by itself, but a module of NNX does not know
    where it lies. No result changes, and modules of Flax itself stay as they are::

        name_scopes(model)
        _, found = stats.collect(nnx.grad(loss))(model, batch)

    Args:
      model: a module, which may hold others. One that stands in several places gets one of its
        paths.
    """
    for path, module in nnx.iter_modules(model):
        if hasattr(module, "weights_of_products"):
            named: Any = module
            named.fp8_scope = "/".join(map(str, path))
