"""Placement: how a tensor is cut over devices, each of which gets its own slice of the file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import SCALE_BLOCK
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.checkpoint._orientation import as_operand
from jax_fp8gemm.checkpoint._sources import Source
from jax_fp8gemm.checkpoint._stored import refuse
from jax_fp8gemm.checkpoint._weights import Weight

Shardings = Mapping[str, Sharding] | Callable[[str, tuple[int, ...]], Sharding | None] | None


def sharding_rules(
    mesh: Mesh, rules: Sequence[tuple[str, PartitionSpec]]
) -> Callable[[str, tuple[int, ...]], Sharding]:
    """Returns shardings for load: of the first rule whose regular expression finds the name.

    Args:
      mesh: the mesh.
      rules: (regular expression, PartitionSpec) pairs. The spec is that of the loaded tensor: of a
        quantised weight (k, n), of stacked experts (E, d, 2 f) and (E, f, d). Tensors without a
        rule are replicated.
    Raises:
      TypeError: mesh is no Mesh, or rules are no pairs of a string and a PartitionSpec.
      ValueError: a string is no regular expression, or the mesh lacks an axis of a spec.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{_RULES}: mesh must be a jax.sharding.Mesh; got {checks.short_repr(mesh)}"
        )
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        given = type(rules).__name__
        raise TypeError(f"{_RULES}: rules must be a list of {_PAIRS}; got {given}")
    compiled = [_compiled_rule(mesh, rule) for rule in rules]
    everywhere = NamedSharding(mesh, PartitionSpec())

    def sharding(name: str, shape: tuple[int, ...]) -> Sharding:
        found = (sharding for pattern, sharding in compiled if pattern.search(name))
        return next(found, everywhere)

    return sharding


_RULES = "checkpoint.sharding_rules"
_PAIRS = "pairs (regular expression, PartitionSpec)"


def _compiled_rule(mesh: Mesh, rule: object) -> tuple[re.Pattern[str], NamedSharding]:
    match rule:
        case (str() as text, PartitionSpec() as spec):
            pass
        case _:
            got = checks.short_repr(rule)
            raise TypeError(f"{_RULES}: each rule must be one of {_PAIRS}; got {got}")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(
            f"{_RULES}: a rule must begin with a regular expression; got {text!r}, {error}"
        ) from None
    try:
        return pattern, NamedSharding(mesh, spec)
    except ValueError as error:
        raise ValueError(
            f"{_RULES}: a spec must name axes of the mesh, {mesh.axis_names}; got {spec} for "
            f"{text!r}. {error}"
        ) from None


def loaded_shape(weight: Weight) -> tuple[int, ...]:
    """Returns the shape of the tensor that a weight becomes: a quantised one is transposed."""
    shape = weight.values.shape
    return shape if weight.scale is None else (*shape[:-2], shape[-1], shape[-2])


def check_shardings(shardings: Shardings) -> None:
    """Raises ValueError unless the argument of load is of one of its kinds."""
    if shardings is None or isinstance(shardings, Mapping) or callable(shardings):
        return
    refuse(
        "shardings must be a dict by name, a function of name and shape, or None",
        checks.short_repr(shardings),
        "checkpoint.sharding_rules(mesh, [(regular expression, PartitionSpec)]) makes a function.",
    )


def check_names(shardings: Shardings, loaded: Collection[str]) -> None:
    """Raises ValueError if a dict of shardings has a name that no loaded tensor has."""
    if isinstance(shardings, Mapping) and (unknown := sorted(set(shardings) - set(loaded))):
        refuse("shardings must have names of loaded tensors alone", ", ".join(unknown[:5]))


def find_sharding(shardings: Shardings, name: str, weight: Weight) -> Sharding:
    """Returns the sharding of a loaded tensor. Raises ValueError unless it cuts it evenly."""
    shape = loaded_shape(weight)
    if isinstance(shardings, Mapping):
        found = shardings.get(name)
    else:
        found = None if shardings is None else shardings(name, shape)
    if found is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    if not isinstance(found, NamedSharding | SingleDeviceSharding):
        refuse("a sharding must be a NamedSharding or on one device", f"{found} for {name}")
    if isinstance(found, NamedSharding):
        cuts = _num_cuts(found, name, shape)
        if any(n % cut for n, cut in zip(shape, cuts, strict=True)):
            got = f"{list(shape)} cut into {list(cuts)} for {name}"
            refuse("a sharding must cut each dimension evenly", got)
    return found


def _num_cuts(sharding: NamedSharding, name: str, shape: Sequence[int]) -> list[int]:
    """Returns into how many shards each dimension is cut."""
    if len(sharding.spec) > len(shape):
        got = f"{sharding.spec} for {name} {list(shape)}"
        refuse("a sharding must have at most an entry for each dimension", got)
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    sizes = sharding.mesh.shape
    return [math.prod(sizes[axis] for axis in group if axis in sizes) for group in axes]


def place(weight: Weight, name: str, sharding: Sharding) -> jax.Array | np.ndarray | ScaledArray:
    """Reads a weight onto the devices of its sharding."""
    if weight.scale is None:
        dtype = weight.values.dtype
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, without x64
            return weight.values.read((slice(None),) * len(weight.values.shape))
        return _place(weight.values, sharding)
    values, scale = sharding, sharding
    if isinstance(sharding, NamedSharding):
        values, scale = _stored_shardings(sharding, name, loaded_shape(weight))
    return as_operand(_place(weight.values, values), _place(weight.scale, scale))


def _place(source: Source, sharding: Sharding) -> jax.Array:
    read = lambda index: source.read(tuple(index))
    return jax.make_array_from_callback(source.shape, sharding, read, dtype=source.dtype)


def _stored_shardings(
    sharding: NamedSharding, name: str, shape: tuple[int, ...]
) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of values and scale as stored, (..., n, k).

    A scale is cut as its values are where their shards hold whole blocks, and else replicated.
    """
    cuts = _num_cuts(sharding, name, shape)
    entries = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    is_whole = [n // cut % SCALE_BLOCK == 0 for n, cut in zip(shape[-2:], cuts[-2:], strict=True)]
    of_scale = [
        *entries[:-2],
        *(entry if whole else None for entry, whole in zip(entries[-2:], is_whole, strict=True)),
    ]
    swap = lambda spec: PartitionSpec(*spec[:-2], spec[-1], spec[-2])
    return sharding.update(spec=swap(entries)), sharding.update(spec=swap(of_scale))


def to_host(x: jax.Array | np.ndarray, i: int | None = None) -> np.ndarray:
    """Returns an array whose shards this process has, or x[i], without work on the mesh."""
    if not isinstance(x, jax.Array):
        return np.asarray(x if i is None else x[i])
    out = np.empty(x.shape if i is None else x.shape[1:], x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id:
            continue
        # NOTE: np.asarray(x) would keep a copy on the host for as long as x lives.
        if i is None:
            out[shard.index] = np.asarray(jnp.copy(shard.data))
            continue
        first = range(x.shape[0])[shard.index[0]]
        if i in first:
            out[shard.index[1:]] = np.asarray(shard.data[i - first.start])
    return out
