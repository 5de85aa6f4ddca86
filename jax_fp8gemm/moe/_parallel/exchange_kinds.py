"""Exchange: how tokens reach the devices of an expert axis, and how their results come back.

Exchanges run inside a shard_map. Each of the p devices along the axis has t tokens. A token goes to
a device at most once, however many of its experts live there.

`send` takes an array with a row for each token (t, ...). It returns an array with a row for each
received token, in the order of the senders, and for each sender in the order of its tokens.
`give_back` goes the other way. It adds the results of a token in f32, in the order of the devices.
So all exchanges along an axis give the same bits, except that AllToAll may need further turns: it
then adds the sums of the turns. Along a pair of axes see hierarchy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm._data.scaled_array import ScaledArray, values_and_scale
from jax_fp8gemm.moe._parallel.ragged_all_to_all import num_updates, ragged_all_to_all
from jax_fp8gemm.moe._parallel.slots import add_parts, assign_slots, pack, unpack

# A pytree of arrays. Each kind of exchange makes plans of its own kind.
Plan: TypeAlias = Any
AxisName: TypeAlias = str | tuple[str, ...]
TurnNumber: TypeAlias = jax.Array | int  # the first turn is 0; later ones are traced
Encode: TypeAlias = Callable[[jax.Array], ScaledArray]


@dataclass(frozen=True)
class Exchange:
    """What is static about an exchange, and how it moves arrays.

    Attributes:
      axis: the mesh axis, or axes, along which tokens travel.
      size: p, the number of devices along the axis.
      tokens: t, the number of tokens on each device.
      top_k: the number of choices of each token.
      slots: the number of rows that a device sends to each device in a turn.
      has_one_turn: whether all tokens find a slot in the first turn, whatever the choices.
    """

    axis: AxisName
    size: int
    tokens: int
    top_k: int
    slots: int
    has_one_turn: bool

    @property
    def received(self) -> int:
        """The number of rows of an array that a device receives."""
        return self.size * self.slots

    def plan(self, devices: jax.Array) -> Plan:
        """Returns where tokens go, by the device of each choice (t, top_k); p is no device."""
        raise NotImplementedError

    def num_turns(self, plan: Plan) -> jax.Array | int:
        """Returns the number of turns that send all tokens; it is the same on all devices."""
        return 1

    def send(
        self, plan: Plan, turn: TurnNumber, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        """Sends x (t, ...) and returns what this device receives.

        empty: what fills the rows that hold no token. None: they may hold anything.
        """
        raise NotImplementedError

    def give_back(
        self, plan: Plan, turn: TurnNumber, y: jax.Array, encode: Encode | None = None
    ) -> jax.Array:
        """Sends back y, which has a row for each received row.

        encode: makes of y what travels. None: y does.
        Returns the f32 sums (t, ...), for each token over the devices that received it.
        """
        if encode is None:
            return add_parts(self.parts(plan, turn, y))
        encoded = encode(y)
        values, scales = (self.parts(plan, turn, x) for x in values_and_scale(encoded))
        parts = (
            ScaledArray(v, s, block=encoded.block) for v, s in zip(values, scales, strict=True)
        )
        return add_parts([part.dequantize(jnp.float32) for part in parts])

    def parts(self, plan: Plan, turn: TurnNumber, y: jax.Array) -> Sequence[jax.Array]:
        """Returns what each device gives back to the tokens (t, ...).

        A device gives zero to a token that it has not received.
        """
        raise NotImplementedError


class AllGather(Exchange):
    """Every token goes to every device; a device receives (p t, ...)."""

    def plan(self, devices: jax.Array) -> Plan:
        return None

    def send(
        self, plan: Plan, turn: TurnNumber, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        return lax.all_gather(x, self.axis, tiled=True)

    def parts(self, plan: Plan, turn: TurnNumber, y: jax.Array) -> Sequence[jax.Array]:
        # psum_scatter would add in the dtype of y, and in an order of its own.
        parts = lax.all_to_all(y, self.axis, 0, 0, tiled=True)
        return list(parts.reshape(self.size, self.tokens, *y.shape[1:]))


class AllToAll(Exchange):
    """Each device sends `slots` rows to each other one in a turn, and receives (p slots, ...)."""

    def plan(self, devices: jax.Array) -> Plan:
        return assign_slots(devices, self.size)

    def num_turns(self, plan: Plan) -> jax.Array | int:
        if self.has_one_turn:
            return 1
        return lax.pmax(-(-plan.counts.max() // self.slots), self.axis)

    def _positions(self, plan: Plan, turn: TurnNumber) -> tuple[jax.Array, jax.Array]:
        """Returns the row of each token for each device, and whether it has one in this turn."""
        slot = plan.rank - turn * self.slots
        has_one = (slot >= 0) & (slot < self.slots)
        return jnp.arange(self.size, dtype=jnp.int32)[None] * self.slots + slot, has_one

    def send(
        self, plan: Plan, turn: TurnNumber, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        positions, has_one = self._positions(plan, turn)
        rows = pack(x, positions, has_one, self.received, empty)
        return lax.all_to_all(rows, self.axis, 0, 0, tiled=True)

    def parts(self, plan: Plan, turn: TurnNumber, y: jax.Array) -> Sequence[jax.Array]:
        rows = lax.all_to_all(y, self.axis, 0, 0, tiled=True)
        return unpack(rows, *self._positions(plan, turn))


@dataclass(frozen=True)
class RaggedAllToAll(Exchange):
    """Only those tokens travel that a device needs; it receives them in (p t, ...).

    Attributes:
      crosses_hosts: whether the devices of the axis are known to be in several hosts.
    """

    crosses_hosts: bool = False

    def plan(self, devices: jax.Array) -> Plan:
        slot, counts = assign_slots(devices, self.size)
        starts = jnp.cumsum(counts) - counts
        sent = lax.all_gather(counts, self.axis)  # by sender and receiver
        me = lax.axis_index(self.axis)
        # Where my rows begin on each receiver, and where the rows that I receive begin there.
        there = (jnp.cumsum(sent, axis=0) - sent)[me]
        origin = (jnp.cumsum(sent, axis=1) - sent)[:, me]
        positions = starts[None] + slot, slot >= 0
        received = sent[:, me]
        out = starts, counts, there, received
        back = jnp.cumsum(received) - received, received, origin, counts
        return positions, out, back

    @property
    def _sent(self) -> int:
        """The number of rows that hold all that a device sends."""
        return self.tokens * min(self.size, self.top_k)

    def _move(self, rows: jax.Array, out: jax.Array, how: tuple[jax.Array, ...]) -> jax.Array:
        updates = 1 if self.crosses_hosts else num_updates(self.size)
        return ragged_all_to_all(rows, out, how, self.axis, updates)

    def send(
        self, plan: Plan, turn: TurnNumber, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        (positions, has_one), how, _ = plan
        rows = pack(x, positions, has_one, self._sent, empty)
        out = jnp.full((self.received, *x.shape[1:]), 0 if empty is None else empty, x.dtype)
        return self._move(rows, out, how)

    def parts(self, plan: Plan, turn: TurnNumber, y: jax.Array) -> Sequence[jax.Array]:
        positions, _, how = plan
        out = jnp.zeros((self._sent, *y.shape[1:]), y.dtype)
        return unpack(self._move(y, out, how), *positions)
