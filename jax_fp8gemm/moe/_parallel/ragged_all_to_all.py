"""ragged_all_to_all: lax.ragged_all_to_all in many updates, which here runs on CPUs too.

XLA's kernel for peers in one host starts peers * updates CTAs of 128 threads, and each of them
stores 8 bytes a thread into the memory of a peer. One update for each peer leaves most
multiprocessors idle. So what a device sends to a peer is split into several updates: more CTAs
write the same rows to the same places.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._runtime.forced import Forced
from jax_fp8gemm._sharding.manual_axes import match_varying

How = tuple[jax.Array, ...]  # input_offsets, send_sizes, output_offsets and recv_sizes

# CTAs of XLA's kernel. Two H200s exchange the tokens of a layer at 65, 99, 137 and 147 GB/s a GPU
# with 64, 128, 256 and 512 of them, four H200s at 135 and 158 with 128 and 256 (jax 0.11.2,
# `bench expert-parallel --exchange`).
_NUM_CTAS = 256
# XLA's kernel writes through pointers of at most 8 peers. For more of them, and for other hosts,
# XLA queues a send and a receive of NCCL for each update: fewer are better there.
_MAX_PEERS = 8

override: Forced[int] = Forced()  # the number of updates within a context


def num_updates(peers: int) -> int:
    """Returns into how many updates a device splits what it sends to each of so many devices.

    A power of two, because XLA's kernel halves the number to share updates among CTAs.
    """
    if override.value is not None:
        return override.value
    if peers > _MAX_PEERS:
        return 1
    return 1 << (_NUM_CTAS // peers).bit_length() - 1


def ragged_all_to_all(
    rows: jax.Array, out: jax.Array, how: How, axis: str | tuple[str, ...], updates: int = 1
) -> jax.Array:
    """Returns `out` with the rows that this device receives.

    how: as for lax.ragged_all_to_all, with one update for each peer.
    updates: into how many the rows for a peer are split. Values do not depend on it.
    """

    def run(rows, out, *how):
        # NOTE: JAX gives the result other varying axes than the rows have.
        sent = lax.ragged_all_to_all(rows, out, *split(how, updates), axis_name=axis)
        return match_varying(sent, rows)[0]

    dense = partial(dense_all_to_all, axis=axis)
    return lax.platform_dependent(rows, out, *how, cpu=dense, default=run)


def split(how: How, updates: int) -> How:
    """Returns `how` with so many updates for each peer, one after another.

    Those of a peer have the same number of rows, except that the last ones may have fewer or none.
    """
    input_offsets, send_sizes, output_offsets, recv_sizes = how
    if updates == 1:
        return how
    sent, starts = _pieces(send_sizes, updates)
    received, _ = _pieces(recv_sizes, updates)
    flat = lambda x: x.reshape(-1)
    return (
        flat(input_offsets[:, None] + starts),
        flat(sent),
        flat(output_offsets[:, None] + starts),
        flat(received),
    )


def _pieces(sizes: jax.Array, updates: int) -> tuple[jax.Array, jax.Array]:
    """Returns the sizes (peers, updates) of the pieces of each slice, and their starts in it."""
    most = (sizes + (updates - 1)) // updates
    starts = most[:, None] * jnp.arange(updates, dtype=sizes.dtype)[None]
    starts = jnp.minimum(starts, sizes[:, None])
    return jnp.minimum(most[:, None], sizes[:, None] - starts), starts


def dense_all_to_all(rows, out, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis):
    """Does what lax.ragged_all_to_all does by gathering everything; XLA has it not for CPUs."""
    me, peers = lax.axis_index(axis), lax.axis_size(axis)
    every = lambda x: lax.all_gather(x, axis)
    # By sender, update and row of the result, of what is sent to this device. NOTE: a loop over
    # senders, which read one start, size and place after the other, lost tokens: XLA for CPUs
    # (jaxlib 0.10.2 and 0.12.0.1) computed a fusion of these otherwise than its HLO says.
    mine = lambda x: every(x).reshape(peers, peers, -1, 1)[:, me]
    starts, sizes, places = map(mine, (input_offsets, send_sizes, output_offsets))
    offset = jnp.arange(out.shape[0], dtype=jnp.int32)[None, None] - places
    is_here = (offset >= 0) & (offset < sizes)
    first_row = rows.shape[0] * jnp.arange(peers, dtype=jnp.int32)[:, None, None]
    # At most one update has a row of the result.
    source = jnp.where(is_here, first_row + starts + offset, 0).sum(axis=(0, 1))
    has_row = is_here.any(axis=(0, 1)).reshape(-1, *(1,) * (out.ndim - 1))
    sent = every(rows).reshape(-1, *rows.shape[1:])
    return jnp.where(has_row, sent.at[source].get(mode="clip"), out)
