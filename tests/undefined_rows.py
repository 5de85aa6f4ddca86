"""Grouped products that leave NaN in the rows of no group, where their caller lets them."""

import jax.numpy as jnp

from jax_fp8gemm._data.groups import group_of_rows
from jax_fp8gemm._primitives import grouped_gemm as _grouped
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive


def poison(monkeypatch):
    """Makes grouped products of what is traced from now on leave NaN in undefined rows, on a CPU.

    Returns a list, which gets the shape of each such product that is lowered.
    """
    shapes = []

    def with_nan(function):
        def run(*operands, out_dtype, unused_rows):
            (out,) = function(*operands, out_dtype=out_dtype, unused_rows=unused_rows)
            if unused_rows == "zero":
                return [out]
            shapes.append(out.shape)
            *_, sizes, first_row = operands
            if out.ndim == 3:
                is_used = jnp.arange(out.shape[1])[None] < sizes[:, None]
            else:
                is_used = group_of_rows(sizes, first_row, out.shape[0]) < sizes.size
            return [jnp.where(is_used[..., None], out, jnp.array(jnp.nan, out_dtype))]

        return run

    plain = with_nan(_grouped._reference), with_nan(_grouped._emulation)
    poisoned = define_primitive(
        "jax_fp8gemm_grouped_gemm",
        _grouped._shape_rule,
        Forms(plain[0], _grouped._ffi_call, plain[1]),
        mesh_rules=MeshRules(_grouped._partition_rule, _grouped._run_shard, ("reduce_dtype",)),
    )
    monkeypatch.setattr(_grouped, "grouped_gemm_p", poisoned)
    return shapes
