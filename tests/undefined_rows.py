"""Grouped products and copies that leave NaN in the rows that hold anything on a GPU."""

import jax.numpy as jnp

from jax_fp8gemm._data.groups import group_of_rows
from jax_fp8gemm._primitives import copy_rows as _copies
from jax_fp8gemm._primitives import grouped_gemm as _grouped
from jax_fp8gemm._primitives.define import Forms, MeshRules, define_primitive


def poison(monkeypatch):
    """Makes what is traced from now on leave NaN in undefined rows, on a CPU.

    Grouped products do so where their caller lets them, and copies of rows always. Returns a list,
    which gets the shape of each such product and of each result of a copy that is lowered.
    """
    shapes = []

    def fill(out, is_used):
        shapes.append(out.shape)
        return jnp.where(is_used[..., None], out, jnp.array(jnp.nan, out.dtype))

    def products(function):
        def run(*operands, **params):
            (out,) = function(*operands, **params)
            if params["unused_rows"] == "zero":
                return [out]
            *_, sizes, first_row = operands
            if out.ndim == 3:
                is_used = jnp.arange(out.shape[1])[None] < sizes[:, None]
            else:
                is_used = group_of_rows(sizes, first_row, out.shape[0]) < sizes.size
            return [fill(out, is_used)]

        return run

    def copies(x, x_scale, places, *, num_rows):
        results = _copies._reference(x, x_scale, places, num_rows=num_rows)
        target = jnp.where(places >= 0, places, num_rows)
        is_used = jnp.zeros_like(places, shape=(num_rows,)).at[target].set(1, mode="drop") > 0
        return [fill(out, is_used) for out in results]

    poisoned = define_primitive(
        "jax_fp8gemm_grouped_gemm",
        _grouped.shape_rule,
        Forms(products(_grouped._reference), _grouped._ffi_call, products(_grouped._emulation)),
        mesh_rules=MeshRules(_grouped._partition_rule, _grouped._run_shard, ("reduce_dtype",)),
    )
    monkeypatch.setattr(_grouped, "grouped_gemm_p", poisoned)
    poisoned = define_primitive(
        "jax_fp8gemm_copy_rows",
        _copies._shape_rule,
        Forms(copies, _copies._ffi_call),
        mesh_rules=MeshRules(_copies._partition_rule),
    )
    monkeypatch.setattr(_copies, "copy_rows_p", poisoned)
    return shapes
