"""naming_devices: the error of an eager op whose operands lie on different devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from jax_fp8gemm._data import checks

Op = TypeVar("Op", bound=Callable[..., Any])


def naming_devices(op: Op) -> Op:
    """Wraps `op`: the error of operands on different devices then names operands and devices.

    JAX's error names the operands of a primitive. An op cannot check devices itself, because it
    does not know whether it is traced: in a program of jax.jit, arrays of other devices are
    constants.
    """
    names = tuple(inspect.signature(op).parameters)

    @functools.wraps(op)
    def named(*args, **kwargs):
        try:
            return op(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
        got = ", ".join(_places(dict(zip(names, args, strict=False)) | kwargs))
        message = f"{op.__name__}: operands must be on the same devices; got {got}"
        raise ValueError(f"{message}. Move them with jax.device_put.")

    return named  # pyright: ignore[reportReturnType]


def _places(arguments: dict[str, Any]) -> Iterator[str]:
    """Yields each operand, with its devices if it is no tracer and has to stay on them."""
    for name, argument in arguments.items():
        for x in jax.tree.leaves(argument):
            if isinstance(x, jax.Array):
                is_placed = not isinstance(x, Tracer) and x.committed
                place = f" on {_short(x.sharding.device_set)}" if is_placed else ""
                yield f"{name} {checks.short_type(x)}{place}"


def _short(devices: Iterable[Any]) -> str:
    first, *rest = sorted(devices, key=lambda device: device.id)
    return f"{first.platform}:{first.id}{f' and {len(rest)} more' if rest else ''}"
