"""Which exchanges `expert-parallel` measures, and rows of an exchange alone."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.families.mesh import AXIS, step_call
from benchmarks.timing.timer import Call
from jax_fp8gemm.moe._parallel import ragged_all_to_all
from jax_fp8gemm.moe._parallel.exchange import (
    NAMES,
    Name,
    NamePair,
    make_exchange,
    make_hierarchy,
    needed_share,
)
from jax_fp8gemm.moe._parallel.exchange_kinds import Exchange, RaggedAllToAll
from jax_fp8gemm.moe._parallel.hierarchy import Hierarchy

UPDATES = (1, 8, 16, 32, 64, 128)
PAIRS = ("all_to_all+all_gather", "all_to_all+all_to_all", "ragged_all_to_all+ragged_all_to_all")
PAIR_AXES = ("hosts", AXIS)
_RAGGED = "ragged_all_to_all"
ALL = (*NAMES[:2], *(f"{_RAGGED}/{updates}" for updates in UPDATES), *PAIRS)


@dataclasses.dataclass(frozen=True)
class Mode:
    """How tokens travel.

    Attributes:
      text: the mode as a row has it.
      names: one exchange, or two: along halves of the GPUs, and along the GPUs of a half.
      updates: of ragged_all_to_all; None for the package's number.
    """

    text: str
    names: tuple[Name, ...]
    updates: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return PAIR_AXES if len(self.names) == 2 else (AXIS,)

    def mesh(self, flat: Mesh) -> Mesh:
        """The GPUs of `flat`, in two halves for a pair of exchanges."""
        if len(self.names) == 1:
            return flat
        devices = flat.devices.reshape(2, -1)
        return Mesh(devices, PAIR_AXES, axis_types=(AxisType.Auto,) * 2)

    def options(self) -> dict[str, Any]:
        """Of moe_layer."""
        names = self.names if len(self.names) == 2 else self.names[0]
        return dict(expert_axis=self.axes, exchange=names)

    @contextlib.contextmanager
    def applied(self):
        """What is traced meanwhile has this mode's number of updates."""
        if self.updates is None:
            yield
            return
        # JAX would take what it has traced with another number.
        jax.clear_caches()
        with ragged_all_to_all.override(self.updates):
            yield
        jax.clear_caches()


def parse_mode(text: str) -> Mode:
    """The mode of "all_gather", "ragged_all_to_all/8" or "all_to_all+all_gather"."""
    one, _, updates = text.partition("/")
    names = one.split("+")
    known: dict[str, Name] = {name: name for name in NAMES}
    if len(names) > 2 or not set(names) <= set(NAMES) or (updates and _RAGGED not in names):
        raise ValueError(
            f"bench: --exchange must be all, or of {', '.join(NAMES)}, {_RAGGED}/UPDATES or "
            f"OUTER+INNER; got '{text}'"
        )
    if updates and not (updates.isdecimal() and int(updates)):
        raise ValueError(f"bench: updates must be a number from 1 on; got '{text}'")
    return Mode(text, tuple(known[name] for name in names), int(updates) if updates else None)


def modes_of(texts: Sequence[str], num_devices: int) -> list[Mode]:
    """The modes of --exchange. "all" leaves out pairs for fewer than four GPUs."""
    every = [text for text in ALL if num_devices >= 4 or "+" not in text]
    return [parse_mode(t) for text in texts for t in (every if text == "all" else [text])]


def make(mode: Mode, sizes: tuple[int, ...], tokens: int, top_k: int) -> Exchange:
    """The exchange of a layer of this mode."""
    if len(mode.names) == 2:
        names: NamePair = (mode.names[0], mode.names[1])
        return make_hierarchy(names, PAIR_AXES, (sizes[0], sizes[1]), tokens, top_k)
    return make_exchange(mode.names[0], AXIS, sizes[0], tokens, top_k)


def received_rows(exchange: Exchange) -> float:
    """Rows that come to a device from others in a turn, of evenly spread choices."""
    if isinstance(exchange, Hierarchy):
        outer, inner = exchange.outer, exchange.inner
        passed_on = needed_share(exchange.size, exchange.top_k) * outer.size * exchange.tokens
        return _received(outer, _needed(outer)) + _received(inner, passed_on)
    return _received(exchange, _needed(exchange))


def _needed(exchange: Exchange) -> float:
    return needed_share(exchange.size, exchange.top_k) * exchange.tokens


def _received(exchange: Exchange, needed: float) -> float:
    rows = needed if isinstance(exchange, RaggedAllToAll) else exchange.slots
    return float((exchange.size - 1) * rows)


def row_bytes(hidden: int, top_k: int) -> int:
    """Of a token there (FP8, scales, an index and a weight for each choice) and back in bf16."""
    return hidden + 4 * -(-hidden // 128) + 8 * top_k + 2 * hidden


def exchange_call(
    flat: Mesh, mode: Mode, tokens: int, top_k: int, hidden: int, experts: int
) -> Call:
    """Tokens there and rows of results back, once each, as a forward pass moves them."""
    mesh = mode.mesh(flat)
    exchange = make(mode, mesh.devices.shape, tokens, top_k)

    def run(values, scale, indices, weights, results):
        plan = exchange.plan(indices // experts)
        sent = [exchange.send(plan, 0, x) for x in (values, scale, weights)]
        return (
            *sent,
            exchange.send(plan, 0, indices, empty=-1),
            exchange.give_back(plan, 0, results),
        )

    each = P(mode.axes)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    p = mesh.size
    arrays = (
        ((p * tokens, hidden), jnp.float8_e4m3fn),
        ((p * tokens, -(-hidden // 128)), jnp.float32),
        ((p * tokens, top_k), jnp.int32),
        ((p * tokens, top_k), jnp.float32),
        ((p * exchange.received, hidden), jnp.bfloat16),
    )

    def make_operands():
        key = jax.random.key(0)
        chosen = jax.random.randint(key, arrays[2][0], 0, p * experts, jnp.int32)
        return tuple(
            chosen if dtype == jnp.int32 else jax.random.normal(key, shape).astype(dtype)
            for shape, dtype in arrays
        )

    operands = jax.jit(make_operands, out_shardings=NamedSharding(mesh, each))()
    with mode.applied():
        return step_call(functools.partial(_stateless, sharded), None, *operands)


def _stateless(function: Any, state: None, *operands: jax.Array) -> tuple[None, Any]:
    return state, function(*operands)
