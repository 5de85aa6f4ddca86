"""RunArguments: the keywords of moe_layer that say how it runs, not what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from jax.sharding import AbstractMesh, Mesh

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.product_spec import check_recipe
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


def check_run_arguments(op: str, options: Mapping[str, Any]) -> None:
    """Raises unless these are RunArguments, with a recipe and an implementation that are ones."""
    known = list(RunArguments.__annotations__)
    if more := sorted(set(options) - set(known)):
        hint = "The config has sizes, router and activation."
        raise TypeError(f"{op}: options must be of {known}; got {more}. {hint}")
    check_recipe(op, options.get("recipe", DEEPSEEK_V3))
    checks.check_implementation(op, options.get("implementation"))
