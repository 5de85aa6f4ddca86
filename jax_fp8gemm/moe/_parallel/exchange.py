"""Exchanges: how tokens reach the devices of an expert axis and their results come back.

For use in shard_map. Each of the p devices along the axis has t tokens, and a token goes to a
device at most once, however many of its experts live there. An exchange turns arrays with a row for
each token (t, ...) into arrays with a row for each received one, in the order of the senders and
then of their tokens; what it gives back is the sum of the results of a token, in f32, in the order
of the devices. So every exchange gives the same bits, while all_to_all takes one turn:

    all_gather         every token goes to every device, (p t, ...)
    all_to_all         `slots` rows from each device to each other, (p slots, ...); tokens that find
                       no slot go in another turn
    ragged_all_to_all  the tokens that are needed and no others, in (p t, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._parallel.ragged_all_to_all import ragged_all_to_all
from jax_fp8gemm.moe._parallel.slots import add_parts, assign_slots, pack, unpack

# A pytree of arrays. Each exchange makes plans of a kind of its own.
Plan: TypeAlias = Any
AxisName = str | tuple[str, ...]
Name = Literal["all_gather", "all_to_all", "ragged_all_to_all"]
NAMES: tuple[Name, ...] = ("all_gather", "all_to_all", "ragged_all_to_all")

# Bytes/s that a device receives, by XLA's collectives on one host of 4 H200s with jax 0.11.2, of
# 235 MB gathered in FP8, and 117 MB exchanged in bf16.
RATES = {"all_gather": 281e9, "all_to_all": 270e9, "ragged_all_to_all": 6e9}
HEADROOM = 1.125  # slots over what evenly spread choices need
_SLOT_UNIT = 128


@dataclass(frozen=True)
class Exchange:
    """What is static about an exchange.

    Attributes:
      axis: the mesh axis or axes.
      size: p, the devices along it.
      tokens: t of each device.
      top_k: experts a token.
      slots: rows that a device sends to each device in a turn.
      has_one_turn: whether all tokens always find a slot in the first turn.
    """

    axis: AxisName
    size: int
    tokens: int
    top_k: int
    slots: int
    has_one_turn: bool

    @property
    def received(self) -> int:
        """Rows of a received array."""
        return self.size * self.slots

    def plan(self, devices: jax.Array) -> Plan:
        """Where each token goes, given the devices of its choices (t, top_k); p is none."""
        raise NotImplementedError

    def num_turns(self, plan: Plan) -> jax.Array | int:
        """Turns until all tokens are sent: the same on all devices of the axis."""
        return 1

    def send(
        self, plan: Plan, turn: jax.Array | int, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        """x (t, ...) as received; `empty` fills rows that no token has, None: with anything."""
        raise NotImplementedError

    def give_back(self, plan: Plan, turn: jax.Array | int, y: jax.Array | ScaledArray) -> jax.Array:
        """f32 sums (t, ...) over the devices that had the token of y, in rows as received."""
        if not isinstance(y, ScaledArray):
            return add_parts(self.parts(plan, turn, y))
        values, scales = (self.parts(plan, turn, x) for x in (y.values, y.scale))
        parts = (ScaledArray(v, s, block=y.block) for v, s in zip(values, scales, strict=True))
        return add_parts([part.dequantize(jnp.float32) for part in parts])

    def parts(self, plan: Plan, turn: jax.Array | int, y: jax.Array) -> Sequence[jax.Array]:
        """What each device has for the tokens (t, ...), zero where it had not the token."""
        raise NotImplementedError


class _AllGather(Exchange):
    def plan(self, devices: jax.Array) -> Plan:
        return None

    def send(
        self, plan: Plan, turn: jax.Array | int, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        return lax.all_gather(x, self.axis, tiled=True)

    def parts(self, plan: Plan, turn: jax.Array | int, y: jax.Array) -> Sequence[jax.Array]:
        # Not psum_scatter, which adds in the dtype of y and in an order of its own.
        parts = lax.all_to_all(y, self.axis, 0, 0, tiled=True)
        return list(parts.reshape(self.size, self.tokens, *y.shape[1:]))


class _AllToAll(Exchange):
    def plan(self, devices: jax.Array) -> Plan:
        return assign_slots(devices, self.size)

    def num_turns(self, plan: Plan) -> jax.Array | int:
        if self.has_one_turn:
            return 1
        _, counts = plan
        return lax.pmax(-(-counts.max() // self.slots), self.axis)

    def _positions(self, plan: Plan, turn: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The row of each token for each device, and whether it has one in this turn."""
        slot = plan[0] - turn * self.slots
        has_one = (slot >= 0) & (slot < self.slots)
        return jnp.arange(self.size, dtype=jnp.int32)[None] * self.slots + slot, has_one

    def send(
        self, plan: Plan, turn: jax.Array | int, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        positions, has_one = self._positions(plan, turn)
        rows = pack(x, positions, has_one, self.received, empty)
        return lax.all_to_all(rows, self.axis, 0, 0, tiled=True)

    def parts(self, plan: Plan, turn: jax.Array | int, y: jax.Array) -> Sequence[jax.Array]:
        rows = lax.all_to_all(y, self.axis, 0, 0, tiled=True)
        return unpack(rows, *self._positions(plan, turn))


class _RaggedAllToAll(Exchange):
    def plan(self, devices: jax.Array) -> Plan:
        slot, counts = assign_slots(devices, self.size)
        starts = jnp.cumsum(counts) - counts
        sent = lax.all_gather(counts, self.axis)  # by sender and receiver
        me = lax.axis_index(self.axis)
        # Where my rows begin on each receiver, and where those that I received began.
        there = (jnp.cumsum(sent, axis=0) - sent)[me]
        origin = (jnp.cumsum(sent, axis=1) - sent)[:, me]
        positions = starts[None] + slot, slot >= 0
        received = sent[:, me]
        out = starts, counts, there, received
        back = jnp.cumsum(received) - received, received, origin, counts
        return positions, out, back

    @property
    def _sent(self) -> int:
        """Rows that hold all that a device sends."""
        return self.tokens * min(self.size, self.top_k)

    def send(
        self, plan: Plan, turn: jax.Array | int, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        (positions, has_one), how, _ = plan
        rows = pack(x, positions, has_one, self._sent, empty)
        out = jnp.full((self.received, *x.shape[1:]), 0 if empty is None else empty, x.dtype)
        return ragged_all_to_all(rows, out, how, self.axis)

    def parts(self, plan: Plan, turn: jax.Array | int, y: jax.Array) -> Sequence[jax.Array]:
        positions, _, how = plan
        out = jnp.zeros((self._sent, *y.shape[1:]), y.dtype)
        return unpack(ragged_all_to_all(y, out, how, self.axis), *positions)


_CLASSES: dict[str, Callable[..., Exchange]] = dict(
    zip(NAMES, (_AllGather, _AllToAll, _RaggedAllToAll), strict=True)
)


def make_exchange(
    name: Name | None,
    axis: AxisName,
    size: int,
    tokens: int,
    top_k: int,
    max_slots: int | None = None,
) -> Exchange:
    """The exchange of this name, or for None the one that `choose_exchange` takes.

    max_slots: tokens that a device sends to another at most, whatever the choices, all in one turn.
      None: any number, of which all_to_all sends in a turn what evenly spread choices need.
    """
    slots = _expected_slots(size, tokens, top_k) if max_slots is None else min(max_slots, tokens)
    name = name or choose_exchange(slots, tokens)
    if name != "all_to_all":
        slots = tokens
    has_one_turn = max_slots is not None or slots == tokens
    return _CLASSES[name](axis, size, tokens, top_k, slots, has_one_turn)


def choose_exchange(slots: int, tokens: int) -> Name:
    """all_to_all where its slots hold so much fewer rows than all tokens that it takes less time.

    ragged_all_to_all moves less than either, but at 2 % of their rate within one host.
    """
    gathered, exchanged = tokens / RATES["all_gather"], slots / RATES["all_to_all"]
    return "all_to_all" if exchanged < gathered else "all_gather"


def _expected_slots(size: int, tokens: int, top_k: int) -> int:
    """Rows for each device that hold evenly spread choices, with headroom; at most all tokens."""
    share = 1 - (1 - 1 / size) ** top_k
    slots = math.ceil(HEADROOM * share * tokens / _SLOT_UNIT) * _SLOT_UNIT
    return min(slots, tokens)
