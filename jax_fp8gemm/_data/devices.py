"""naming_devices: the error of an eager op whose operands lie on different devices."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, ParamSpec, TypeVar, cast

import jax

from jax_fp8gemm._data import arrays, checks
from jax_fp8gemm._runtime import jax_drift

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_Devices = Set[Any]  # jaxlib has no types

# jax.sharding.get_mesh, which raises in a derivative.
_context_mesh = jax_drift.optional("jax._src.mesh.get_concrete_mesh", lambda: None)


def naming_devices(op: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps `op`: the error of operands on different devices then names operands and devices.

    JAX's error names the operands of a primitive. An op cannot check devices itself, because it
    does not know whether it is traced: in a program of jax.jit, arrays of other devices are
    constants.
    """
    signature = inspect.signature(op)

    @functools.wraps(op)
    def named(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return op(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
        operands = _operands(signature.bind(*args, **kwargs).arguments)
        raise ValueError(f"{op.__name__}: {_conflict(dict(operands))}")

    return named


def _conflict(operands: Mapping[str, jax.Array]) -> str:
    """Says where the operands lie, and the mesh of jax.set_mesh if one of them lies elsewhere."""
    devices = {name: _devices_of(x) for name, x in operands.items()}
    mesh = _devices_of_mesh()
    is_off_mesh = bool(mesh) and any(found and found != mesh for found in devices.values())
    got = [f"{name} {checks.short_type(x)}{_on(devices[name])}" for name, x in operands.items()]
    got += [f"the mesh of jax.set_mesh{_on(mesh)}"] if is_off_mesh else []
    return (
        f"operands must be on the same devices; got {', '.join(got)}. "
        f"Move them {'onto the mesh ' if is_off_mesh else ''}with jax.device_put."
    )


def _operands(arguments: Mapping[str, object]) -> Iterator[tuple[str, jax.Array]]:
    """Yields each array, with its name: that of the argument, and of the part, as in rhs.scale."""
    for name, argument in arguments.items():
        parts = cast(Any, jax.tree.leaves_with_path(arrays.as_array(argument)))
        for path, x in parts:
            if isinstance(x, jax.Array):
                yield f"{name}{jax.tree_util.keystr(path)}", x


def _devices_of(x: jax.Array) -> _Devices:
    """Returns the devices that `x` has to stay on, none of a tracer."""
    is_placed = not arrays.is_tracer(x) and x.committed
    return cast(_Devices, x.sharding.device_set) if is_placed else frozenset()


def _devices_of_mesh() -> _Devices:
    """Returns the devices of the mesh of jax.set_mesh, none without one."""
    mesh = _context_mesh()
    return frozenset() if mesh is None or mesh.empty else frozenset(mesh.devices.flat)


def _on(devices: _Devices) -> str:
    if not devices:
        return ""
    first, *rest = sorted(devices, key=lambda device: device.id)
    return f" on {first.platform}:{first.id}{f' and {len(rest)} more' if rest else ''}"
