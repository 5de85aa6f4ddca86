"""Hierarchy: an exchange along a pair of mesh axes, hosts and the devices of each host.

A token goes once to each host that holds one of its experts, however many of its devices need it:
along the outer axis, to the device with the sender's number in that host. The inner exchange takes
it on to the devices. What comes back is added by the inner exchange first, in f32 and in the order
of the host's devices. This sum is rounded to the dtype of the results, or encoded once more, and
goes back along the outer axis. There the sums of the hosts are added in f32, in their order.

    device (host, i)  --outer-->  (host', i)  --inner-->  (host', j)

Devices are numbered along both axes, the outer one first. Which tokens an inner exchange takes on
depends on the turn of the outer one. So a plan has an inner plan for each turn that the outer
exchange can have. Both may need further turns: an outer turn is sent again for each of its inner
turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8gemm.moe._parallel.exchange_kinds import Encode, Exchange, Plan, TurnNumber


class HierarchyPlan(NamedTuple):
    """The plans of both exchanges.

    Attributes:
      outer: the plan of the outer exchange.
      inner: the plans of the inner exchange, stacked: one for each turn of the outer one.
      ends: (turns of the outer exchange,) int32, the number of turns up to the end of each.
    """

    outer: Plan
    inner: Plan
    ends: jax.Array


class _Now(NamedTuple):
    """A turn of both exchanges, and the plan of the inner one."""

    outer_turn: TurnNumber
    inner_turn: TurnNumber
    inner: Plan


@dataclass(frozen=True)
class Hierarchy(Exchange):
    """Sends a token once to each host, and from there to the devices that need it.

    Attributes:
      outer: the exchange along the axis of the hosts.
      inner: the exchange along the devices of a host. Its tokens are what `outer` receives.
    """

    outer: Exchange
    inner: Exchange

    @classmethod
    def of(cls, outer: Exchange, inner: Exchange) -> Hierarchy:
        axes: Any = outer.axis, inner.axis
        has_one_turn = outer.has_one_turn and inner.has_one_turn
        size = outer.size * inner.size
        of_tokens = outer.tokens, outer.top_k
        return cls(axes, size, *of_tokens, inner.slots, has_one_turn, outer, inner)

    @property
    def received(self) -> int:
        return self.inner.received

    @property
    def _outer_turns(self) -> int:
        """The most turns that the outer exchange can have."""
        return 1 if self.outer.has_one_turn else -(-self.outer.tokens // self.outer.slots)

    def plan(self, devices: jax.Array) -> HierarchyPlan:
        outer = self.outer.plan(devices // self.inner.size)
        first = lax.axis_index(self.outer.axis) * self.inner.size

        def plan_turn(turn: TurnNumber) -> Plan:
            # A choice in another host is that of no device of this one.
            return self.inner.plan(self.outer.send(outer, turn, devices, empty=self.size) - first)

        if self._outer_turns == 1:
            inner = jax.tree.map(lambda x: x[None], plan_turn(0))
        else:
            inner = jax.vmap(plan_turn)(jnp.arange(self._outer_turns, dtype=jnp.int32))
        return HierarchyPlan(outer, inner, self._ends(outer, inner))

    def _ends(self, outer: Plan, inner: Plan) -> jax.Array:
        counts = jnp.ones((self._outer_turns,), jnp.int32)
        if not self.inner.has_one_turn:
            counts = lax.pmax(jax.vmap(self.inner.num_turns)(inner), self.outer.axis)
        if not self.outer.has_one_turn:
            num_turns = lax.pmax(self.outer.num_turns(outer), self.inner.axis)
            counts = jnp.where(jnp.arange(counts.size, dtype=jnp.int32) < num_turns, counts, 0)
        return jnp.cumsum(counts, dtype=jnp.int32)

    def num_turns(self, plan: HierarchyPlan) -> jax.Array | int:
        return 1 if self.has_one_turn else plan.ends[-1]

    def _now(self, plan: HierarchyPlan, turn: TurnNumber) -> _Now:
        if isinstance(turn, int):
            return _Now(0, 0, jax.tree.map(lambda x: x[0], plan.inner))
        outer_turn = (turn >= plan.ends).sum(dtype=jnp.int32)
        start = jnp.where(outer_turn > 0, plan.ends[outer_turn - 1], 0)
        inner = jax.tree.map(lambda x: x[outer_turn], plan.inner)
        return _Now(outer_turn, turn - start, inner)

    def send(
        self, plan: HierarchyPlan, turn: TurnNumber, x: jax.Array, empty: int | None = None
    ) -> jax.Array:
        now = self._now(plan, turn)
        in_host = self.outer.send(plan.outer, now.outer_turn, x, empty)
        return self.inner.send(now.inner, now.inner_turn, in_host, empty)

    def give_back(
        self, plan: HierarchyPlan, turn: TurnNumber, y: jax.Array, encode: Encode | None = None
    ) -> jax.Array:
        now = self._now(plan, turn)
        in_host = self.inner.give_back(now.inner, now.inner_turn, y, encode).astype(y.dtype)
        return self.outer.give_back(plan.outer, now.outer_turn, in_host, encode)
