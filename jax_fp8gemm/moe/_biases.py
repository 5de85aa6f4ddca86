"""Biases of experts: a row added to the results of each product, chosen by the group of the row.

XLA adds them between the kernels: each of the two sums reads and writes the result of a product
once more, 8 f bytes for each row of gate_up (m, 2 f) in bf16 and 4 d for each of out (m, d). Their
gradients read gate_up, dh and dout once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.groups import (
    Groups,
    column_starts,
    count_up_to,
    group_of_rows,
    row_ranges,
    rows_of_columns,
)
from jax_fp8gemm._sharding.explicit_axes import reshard, with_auto_axes

_BLOCK = formats.SCALE_BLOCK


class Biases(NamedTuple):
    """The biases of all experts.

    Attributes:
      gate_up: (g, 2 f), added before the activation.
      down: (g, d), added to the result of each row.
    """

    gate_up: jax.Array
    down: jax.Array


def check_biases(op: str, biases: Any, w_gate_up: Any, w_down: Any) -> Biases | None:
    """Returns the biases; raises unless they are None or those of the experts of these weights."""
    if biases is None:
        return None
    form = "(b_gate_up (g, 2 f), b_down (g, d))"
    found = Biases(*checks.check_pair(op, "biases", form, biases))
    for name, b, w in zip(("biases[0]", "biases[1]"), found, (w_gate_up, w_down), strict=True):
        checks.check_array(op, name, b)
        checks.check_dtype(op, name, b, formats.FLOAT_DTYPES)
        if b.shape != (w.shape[0], w.shape[2]):
            raise ValueError(
                f"{op}: biases must be {form}, a row for each expert; "
                f"got {name} {checks.short_type(b)} with weights {checks.short_type(w)}"
            )
    return Biases(*map(jnp.asarray, found))


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array, groups: Groups) -> jax.Array:
    """Returns x (m, n) plus, in f32, the row of bias (g, n) of each row's group."""
    # Not inside with_auto_axes, because of the constants: see its note on scans.
    group = group_of_rows(groups.sizes, groups.first_row, x.shape[0])
    return with_auto_axes(_add_bias, (x, bias, group), lambda: jax.typeof(x).sharding.spec)


def _add_bias(x: jax.Array, bias: jax.Array, group: jax.Array) -> jax.Array:
    rows = rows_of_bias(bias, group)
    return (x.astype(jnp.float32) + rows).astype(x.dtype)


def _add_bias_fwd(x: jax.Array, bias: jax.Array, groups: Groups) -> Any:
    return add_bias(x, bias, groups), (groups, bias)


def _add_bias_bwd(kept: Any, dout: jax.Array) -> tuple[Any, ...]:
    # Not what JAX makes of the gather, a scatter-add whose order nothing fixes.
    groups, bias = kept
    return dout, _as_gradient(sum_of_groups(dout, groups), bias), None


add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


def as_biases(gradients: Biases | None, biases: Biases | None) -> Biases | None:
    """Returns gradients with the dtypes of the biases, and sharded as these over Explicit axes."""
    if gradients is None or biases is None:
        return None
    return Biases(*map(_as_gradient, gradients, biases))


def _as_gradient(gradient: jax.Array, bias: jax.Array) -> jax.Array:
    return reshard(gradient.astype(bias.dtype), jax.typeof(bias).sharding.spec)


def rows_of_bias(bias: jax.Array, group: jax.Array) -> jax.Array:
    """Returns the f32 rows of bias of these groups; zeros for a group that is none."""
    return bias.astype(jnp.float32).at[group].get(mode="fill", fill_value=0)


@jax.named_scope("fp8gemm_bias_gradient")
def sum_of_groups(x: jax.Array, groups: Groups) -> jax.Array:
    """Returns the f32 sum of the rows of each group of x (m, n): (g, n), zero for an empty group.

    The rows of a group are added by 128, from its first one on, and then these sums. So a sum
    depends neither on the other groups nor on the order in which threads finish.
    """
    return with_auto_axes(_sum_of_groups, (x, *groups), PartitionSpec)


def _sum_of_groups(x: jax.Array, sizes: jax.Array, first_row: jax.Array) -> jax.Array:
    m, n = x.shape
    if x.size == 0:
        return jnp.zeros((sizes.size, n), jnp.float32)
    # Ragged columns: every group starts at a multiple of 128.
    rows = rows_of_columns(sizes, first_row, m)
    blocks = x.astype(jnp.float32).at[rows].get(mode="fill", fill_value=0)
    blocks = blocks.reshape(-1, _BLOCK, n).sum(axis=1)
    starts = column_starts(*row_ranges(sizes, first_row, m)) // _BLOCK
    number = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    group = count_up_to(starts, number) - 1
    # Not a product with zeros and ones, which would carry a NaN to every group.
    is_of_group = group[None] == jnp.arange(starts.size, dtype=jnp.int32)[:, None]
    return jnp.where(is_of_group[:, :, None], blocks[None], 0).sum(axis=1)
