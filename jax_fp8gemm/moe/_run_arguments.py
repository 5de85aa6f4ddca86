"""RunArguments: the keywords of moe_layer that say how it runs, not what it computes."""

from __future__ import annotations

from typing import TypedDict

from jax.sharding import AbstractMesh, Mesh

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import Recipe
from jax_fp8gemm.moe._parallel.exchange import Name, NamePair
from jax_fp8gemm.moe._parallel.exchange_kinds import AxisName
from jax_fp8gemm.moe._parallel.parts import NumParts


class RunArguments(TypedDict, total=False):
    """Keywords of moe_layer, which describes them; for functions that pass them on to it."""

    recipe: Recipe | str
    implementation: Implementation
    gate_up_pieces: int
    expert_axis: AxisName | None
    exchange: Name | NamePair | None
    parts: NumParts | None
    capacity_factor: float | None
    mesh: Mesh | AbstractMesh | None
