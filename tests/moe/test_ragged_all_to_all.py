"""Slices of a ragged exchange in several updates, against what JAX documents, in NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm.moe._parallel import ragged_all_to_all as ragged

PEERS, ROWS, ROOM = 4, 40, 70
# (sender, receiver): none, one, fewer than the updates, no multiple of them.
SIZES = np.array([[0, 1, 5, 23], [7, 0, 0, 9], [40, 0, 0, 0], [3, 3, 3, 3]], np.int32)


def offsets():
    """input_offsets and output_offsets, by sender and receiver; with gaps of a row."""
    before = lambda sizes, axis: np.cumsum(sizes, axis=axis) - sizes
    return before(SIZES, 1), before(SIZES + 1, 0)


def moved(rows, sizes, starts, places):
    """What each device has after the updates (sender, receiver, update), in NumPy; -1 elsewhere."""
    out = np.full((PEERS, ROOM), -1, rows.dtype)
    for sender, receiver, i in np.ndindex(sizes.shape):
        size, start, place = (int(x[sender, receiver, i]) for x in (sizes, starts, places))
        out[receiver, place : place + size] = rows[sender, start : start + size]
    return out


def test_updates_move_what_one_slice_does_and_no_row_twice():
    rows = np.arange(PEERS * ROWS, dtype=np.int32).reshape(PEERS, ROWS)
    starts, places = offsets()
    expected = moved(rows, *(x[..., None] for x in (SIZES, starts, places)))
    for updates in (1, 2, 8, 16, 32, 64):
        arguments = zip(starts, SIZES, places, SIZES.T, strict=True)
        how = [ragged.split(tuple(map(jnp.asarray, of_one)), updates) for of_one in arguments]
        starts_in, sent, places_in, received = (
            np.stack(x).reshape(PEERS, PEERS, updates) for x in zip(*how, strict=True)
        )
        np.testing.assert_array_equal(sent.sum(axis=2), SIZES)
        # Of JAX's rules for the arguments: each receiver expects what is sent to it.
        np.testing.assert_array_equal(received, sent.swapaxes(0, 1))
        assert (sent >= 0).all() and sent.max() == -(-SIZES.max() // updates)
        np.testing.assert_array_equal(moved(rows, sent, starts_in, places_in), expected)


@pytest.mark.parametrize("updates", [1, 8])
def test_emulation_on_a_cpu(updates):
    rows = jnp.arange(PEERS * ROWS, dtype=jnp.int32).reshape(PEERS, ROWS)
    starts, places = offsets()

    def on_device(rows, *how):
        how = ragged.split(tuple(x[0] for x in how), updates)
        out = jnp.full((ROOM,), -1, jnp.int32)
        return ragged.dense_all_to_all(rows[0], out, *how, axis="x")[None]

    run = jax.shard_map(
        on_device, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    found = jax.jit(run)(rows, starts, SIZES, places, SIZES.T)
    expected = moved(np.asarray(rows), *(x[..., None] for x in (SIZES, starts, places)))
    np.testing.assert_array_equal(found, expected)


def lowered_updates(peers):
    """The length of the offsets in the program for CUDA, over so many devices."""
    on = jax.sharding.AbstractMesh((peers,), ("x",), axis_types=(AxisType.Auto,))

    def on_device(rows, sizes):
        how = (sizes,) * 4
        out = jnp.zeros((ROOM,), jnp.float32)
        return ragged.ragged_all_to_all(rows, out, how, "x", ragged.num_updates(peers))

    run = jax.shard_map(on_device, mesh=on, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    of = jax.ShapeDtypeStruct
    shapes = of((ROWS * peers,), jnp.float32), of((peers * peers,), jnp.int32)
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")]
    export = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=unchecked)
    (call,) = re.findall(r"@ragged_all_to_all.* : \((.*)\) ->", export(*shapes).mlir_module())
    lengths = set(map(int, re.findall(r"tensor<(\d+)xi32>", call)))
    (length,) = lengths
    return length


def test_updates_of_the_program_for_gpus():
    # About as many CTAs of XLA's kernel, however many devices there are.
    assert lowered_updates(2) == lowered_updates(4) == lowered_updates(8) == 256
    assert lowered_updates(3) == 3 * 64
    # Through NCCL each update is a message of its own.
    assert lowered_updates(16) == 16
    with ragged.override(8):
        assert lowered_updates(4) == lowered_updates(2) * 2 == 4 * 8
