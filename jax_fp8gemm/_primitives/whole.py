"""whole_p: gives every device whole matrices (g, n, k), quantised, with their scales.

It computes nothing. A mesh may cut g, so each device has whole matrices afterwards. With twins
(_sharding/twins.py) a mesh that has to gather them gathers the twins, and transposes those.
"""

from __future__ import annotations

import jax

from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.scaled_array import ScaledArray, twin_of, values_and_scale
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive
from jax_fp8gemm._sharding.rule import PartitionRule


@jax.named_scope("fp8gemm_whole")
def whole_matrices(w: ScaledArray, implementation: Implementation = None) -> ScaledArray:
    """Returns w (g, n, k) with its values alone, and n and k gathered."""
    twins = dict(enumerate(twin_of(w) or ()))
    values, scale = whole_p(*values_and_scale(w), implementation=implementation, twins=twins)
    return ScaledArray(values, scale, None, w.block)


def _shape_rule(values, scale) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (values, scale)]


def _reference(values, scale) -> list[jax.Array]:
    return [values, scale]


def _partition_rule(values, scale) -> PartitionRule:
    return PartitionRule(("g n k", "g n k"), ("g n k", "g n k"), uncut=("n", "k"))


whole_p = define_primitive(
    "jax_fp8gemm_whole",
    _shape_rule,
    Forms(_reference, _reference),
    mesh_rules=MeshRules(_partition_rule),
)
