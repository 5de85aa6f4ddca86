"""Proposed shardings: what XLA asks of a partition rule, as mesh axes of each dimension.

XLA may cut a dimension by a part of a mesh axis. With two heads whose columns lie on an axis of
four devices, it cuts the heads by half of that axis. No PartitionSpec of the mesh says so, and JAX
raises where it is asked for one. So the axes are split, here, into their prime factors.
"""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_fp8gemm._sharding.rule import Spec


def read_proposals(mesh: Mesh, arrays: Sequence[jax.ShapeDtypeStruct]) -> tuple[Mesh, list[Spec]]:
    """Returns the mesh axes that cut each dimension of each array, and the mesh that has them.

    The mesh is the given one where its axes will do, and else one of the same devices whose axes
    are the prime factors. An array that not even these describe is as one that nothing cuts: XLA
    gathers it.
    """
    found = [_spec(mesh, x) for x in arrays]
    if None in found:
        mesh = _in_prime_factors(mesh)
        found = [_spec(mesh, x) for x in arrays]
    nothing = [[()] * len(x.shape) for x in arrays]
    return mesh, [spec or none for spec, none in zip(found, nothing, strict=True)]


def _spec(mesh: Mesh, x: jax.ShapeDtypeStruct) -> Spec | None:
    """Returns the mesh axes that cut each dimension, or None where a part of an axis does."""
    ndim = len(x.shape)
    sharding: Any = x.sharding
    hlo_sharding: Any = None if sharding is None else sharding._to_xla_hlo_sharding(ndim)
    if hlo_sharding is None or not hlo_sharding.is_tiled():
        return [()] * ndim
    # Of each device of the mesh, the index of its tile in each dimension. Behind those of the
    # array there may be one of copies.
    tiles: list[int] = hlo_sharding.tile_assignment_dimensions()
    devices: list[int] = hlo_sharding.tile_assignment_devices()
    index = np.empty((len(tiles), mesh.size), int)
    index[:, devices] = np.indices(tiles).reshape(len(tiles), -1)
    axes = [_axes_of(mesh, tile.reshape(mesh.devices.shape)) for tile in index[:ndim]]
    return None if None in axes else [found for found in axes if found is not None]


def _axes_of(mesh: Mesh, index: np.ndarray) -> tuple[str, ...] | None:
    """Returns the axes, major first, that number the devices as `index` does, or None."""
    coordinates = dict(zip(mesh.axis_names, np.indices(index.shape), strict=True))
    step = {  # from one device to the next along the axis
        axis: int(index[tuple(int(axis == other) for other in mesh.axis_names)])
        for axis, size in mesh.shape.items()
        if size > 1
    }
    axes = sorted((axis for axis in step if step[axis]), key=lambda axis: -step[axis])
    number = np.zeros_like(index)
    for axis in axes:
        number = number * mesh.shape[axis] + coordinates[axis]
    return tuple(axes) if np.array_equal(number, index) else None


def _in_prime_factors(mesh: Mesh) -> Mesh:
    factors = {
        f"{axis}/{i}": factor
        for axis, size in mesh.shape.items()
        for i, factor in enumerate(_prime_factors(size))
    }
    return Mesh(mesh.devices.reshape(tuple(factors.values())), tuple(factors))


def _prime_factors(n: int) -> list[int]:
    for divisor in range(2, math.isqrt(n) + 1):
        if n % divisor == 0:
            return [divisor, *_prime_factors(n // divisor)]
    return [n]
