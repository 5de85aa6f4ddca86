"""ragged_all_to_all: lax.ragged_all_to_all, which here runs on CPUs too."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._sharding.manual_axes import match_varying


def ragged_all_to_all(
    rows: jax.Array, out: jax.Array, how: tuple[jax.Array, ...], axis: str | tuple[str, ...]
) -> jax.Array:
    """Returns `out` with the rows that this device receives.

    how: input_offsets, send_sizes, output_offsets and recv_sizes, as for lax.ragged_all_to_all.
    """

    def run(rows, out, *how):
        # NOTE: JAX gives the result other varying axes than the rows have.
        return match_varying(lax.ragged_all_to_all(rows, out, *how, axis_name=axis), rows)[0]

    dense = partial(_dense_all_to_all, axis=axis)
    return lax.platform_dependent(rows, out, *how, cpu=dense, default=run)


def _dense_all_to_all(rows, out, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis):
    """Does what lax.ragged_all_to_all does by gathering everything; XLA has it not for CPUs."""
    me = lax.axis_index(axis)
    every = lambda x: lax.all_gather(x, axis)
    starts, sizes, places = (every(x)[:, me] for x in (input_offsets, send_sizes, output_offsets))
    for sent, start, size, place in zip(every(rows), starts, sizes, places, strict=True):
        offset = jnp.arange(out.shape[0], dtype=jnp.int32) - place
        has_row = ((offset >= 0) & (offset < size)).reshape(-1, *(1,) * (out.ndim - 1))
        out = jnp.where(has_row, sent.at[start + offset].get(mode="clip"), out)
    return out
