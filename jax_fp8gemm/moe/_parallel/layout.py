"""MeshLayout: how a mesh cuts the arrays of an expert-parallel layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_fp8gemm._data import checks
from jax_fp8gemm._sharding.manual_axes import match_varying
from jax_fp8gemm._sharding.rule import axes_of
from jax_fp8gemm.moe._operands import Inputs
from jax_fp8gemm.moe._options import OP, LayerOptions
from jax_fp8gemm.moe._parallel.exchange import NAMES


@dataclass(frozen=True)
class MeshLayout:
    """How a mesh cuts the arrays of a layer, all of them along their first dimension.

    Attributes:
      mesh: the mesh of the caller.
      token_axes: the axes that cut the tokens. They are all axes that are not manual.
      expert_axes: the axes that cut the experts. They are some of token_axes.
    """

    mesh: Mesh | AbstractMesh
    token_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """The number of parts into which the tokens are cut."""
        return math.prod(self.mesh.shape[name] for name in self.token_axes)

    @property
    def is_nested(self) -> bool:
        """Whether the layer is inside a shard_map over other axes."""
        return set(self.token_axes) != set(self.mesh.axis_names)

    @property
    def num_expert_devices(self) -> int:
        """The number of parts into which the experts are cut."""
        return math.prod(self.mesh.shape[name] for name in self.expert_axes)

    @property
    def tokens(self) -> PartitionSpec:
        """How an array of tokens is cut, and anything else that differs on each device."""
        return PartitionSpec(self.token_axes)

    @property
    def experts(self) -> PartitionSpec:
        """How an array of experts is cut."""
        return PartitionSpec(self.expert_axes)

    def map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Returns a function that moves its operands as in_specs say, and maps their shards."""
        sharded = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.token_axes),
            check_vma=check_vma,
        )

        def run(*operands):
            moved = [
                jax.tree.map(partial(self.place, spec=spec), operand)
                for spec, operand in zip(in_specs, operands, strict=True)
            ]
            # NOTE: without check_vma, no result varies over the axes of an outer shard_map.
            outer = jax.tree.leaves(moved)
            return jax.tree.map(lambda y: match_varying(y, *outer)[0], sharded(*moved))

        return run

    def place(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """Returns `x` cut as `spec` says along Explicit axes; XLA moves it along the others."""
        x = jnp.asarray(x)
        explicit = set(self.mesh.abstract_mesh.explicit_axes)
        if not explicit:
            return x
        dims = [tuple(name for name in axes_of(e) if name in explicit) or None for e in spec]
        return jax.sharding.reshard(x, NamedSharding(self.mesh, PartitionSpec(*dims)))


def axis_names(expert_axis: Any, exchange: Any) -> tuple[str, ...]:
    """Returns the mesh axes that `expert_axis` names; raises where it or `exchange` is wrong."""
    names = (expert_axis,) if isinstance(expert_axis, str) else expert_axis
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{OP}: expert_axis must be the name of a mesh axis, or a tuple of names; "
            f"got {checks.short_repr(expert_axis)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            f"{OP}: expert_axis must name each mesh axis once; got {checks.short_repr(expert_axis)}"
        )
    _check_exchange(exchange, names)
    return names


def _check_exchange(exchange: Any, names: tuple[str, ...]) -> None:
    """Raises ValueError unless `exchange` names one, or a pair that goes with a pair of axes."""
    is_name = lambda name: isinstance(name, str | None) and name in (None, *NAMES)
    if not isinstance(exchange, tuple):
        if not is_name(exchange):
            raise ValueError(
                f"{OP}: exchange must be None or of {', '.join(NAMES)}; "
                f"got {checks.short_repr(exchange)}"
            )
        return
    if len(exchange) != 2 or not all(map(is_name, exchange)):
        raise ValueError(
            f"{OP}: a pair of exchanges must be two, each None or of {', '.join(NAMES)}; "
            f"got {checks.short_repr(exchange)}"
        )
    if len(names) != 2:
        raise ValueError(
            f"{OP}: a pair of exchanges must go with a pair of mesh axes, hosts and the devices of "
            f"a host; got {checks.short_repr(exchange)}, expert_axis {', '.join(names)}. "
            "Name one exchange, or two axes."
        )


def is_manual(names: tuple[str, ...]) -> bool:
    """Returns whether the caller is inside a shard_map over these axes."""
    return set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def lay_out(
    options: LayerOptions, inputs: Inputs, names: tuple[str, ...], mesh: Mesh | AbstractMesh | None
) -> MeshLayout:
    """Returns how a mesh cuts the inputs; raises ValueError if it cannot.

    Experts are cut along the axes of `names`. Tokens are cut along all axes of the mesh, except
    those of a shard_map around the call. Tokens that do not divide evenly are padded later.
    """
    num_tokens, num_experts = inputs.x.shape[0], inputs.w_gate_up.shape[0]
    mesh = _mesh_of(inputs) if mesh is None else mesh
    if unknown := sorted(set(names) - set(mesh.axis_names)):
        raise ValueError(
            f"{OP}: expert_axis must name axes of the mesh, {', '.join(mesh.axis_names)}; "
            f"got {', '.join(unknown)}"
        )
    token_axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    if manual := sorted(set(names) - set(token_axes)):
        raise ValueError(
            f"{OP}: expert_axis must name axes that all are, or all are not, those of a shard_map "
            f"around the call; got {', '.join(names)}, of which {', '.join(manual)} are"
        )
    layout = MeshLayout(mesh, token_axes, names)
    if num_tokens % layout.num_devices and options.has_capacity:
        raise ValueError(
            f"{OP}: with a capacity_factor, which counts the tokens of a device, the tokens must "
            f"divide evenly among the {layout.num_devices} devices of the mesh axes "
            f"{', '.join(token_axes)}; got {num_tokens} tokens. Pad x, or call in a shard_map."
        )
    if num_experts % layout.num_expert_devices:
        raise ValueError(
            f"{OP}: the experts must divide evenly among the {layout.num_expert_devices} devices "
            f"of expert_axis; got {num_experts}. Add experts that no token chooses, or put "
            "expert_axis on another mesh axis."
        )
    return layout


def _mesh_of(inputs: Inputs) -> Mesh | AbstractMesh:
    """Returns the mesh of jax.set_mesh, or else the mesh of an input."""
    current = jax.sharding.get_abstract_mesh()
    if not current.empty:
        return current
    for x in jax.tree.leaves(inputs):
        on = getattr(jax.typeof(x).sharding, "mesh", None)
        if on is not None and not on.empty:
            return on
    raise ValueError(
        f"{OP}: expert_axis must be an axis of a mesh; got none. Call within jax.set_mesh(mesh) or "
        "a shard_map over the axis, or pass mesh=."
    )
