"""RunArguments: the keywords of moe_layer that say how it runs, not what it computes."""

from __future__ import annotations

from collections.abc import Iterable
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


def check_run_arguments(op: str, options: Iterable[str]) -> None:
    """Raises TypeError unless these are names of RunArguments."""
    known = list(RunArguments.__annotations__)
    if more := sorted(set(options) - set(known)):
        hint = "The config has sizes, router and activation."
        raise TypeError(f"{op}: options must be of {known}; got {more}. {hint}")
