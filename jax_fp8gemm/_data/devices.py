"""naming_devices: the error of an eager op whose operands lie on different devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import Sharding

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._sharding.partition import sorted_devices

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def naming_devices(op: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps `op`: the error of operands on different devices then names operands and devices.

    JAX's error names the operands of a primitive. An op cannot check devices itself, because it
    does not know whether it is traced: in a program of jax.jit, arrays of other devices are
    constants.
    """
    names = tuple(inspect.signature(op).parameters)

    @functools.wraps(op)
    def named(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return op(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
        got = ", ".join(_places(dict(zip(names, args, strict=False)) | kwargs))
        message = f"{op.__name__}: operands must be on the same devices; got {got}"
        raise ValueError(f"{message}. Move them with jax.device_put.")

    return named


def _places(arguments: Mapping[str, object]) -> Iterator[str]:
    """Yields each operand, with its devices if it is no tracer and has to stay on them."""
    for name, argument in arguments.items():
        for x in jax.tree.leaves(argument):
            if isinstance(x, jax.Array):
                is_placed = not arrays.is_tracer(x) and x.committed
                place = f" on {_short(x.sharding)}" if is_placed else ""
                yield f"{name} {checks.short_type(x)}{place}"


def _short(sharding: Sharding) -> str:
    first, *rest = sorted_devices(sharding)
    return f"{first.platform}:{first.id}{f' and {len(rest)} more' if rest else ''}"
