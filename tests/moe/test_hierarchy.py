"""Exchanges along a pair of axes, hosts and their devices, against NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel.exchange import NAMES, make_exchange, make_hierarchy
from jax_fp8gemm.moe._routing import Routing

SIZE, TOKENS, TOP_K, D = 8, 24, 3, 2
SHAPES = [(2, 4), (4, 2)]
# All pairs of exchanges, on one of the meshes each.
CASES = list(zip(itertools.product(NAMES, NAMES), itertools.cycle(SHAPES)))


@functools.cache
def choices():
    """The device of each choice of each device's tokens; SIZE is none."""
    rng = np.random.default_rng(0)
    devices = rng.integers(0, SIZE + 1, size=(SIZE, TOKENS, TOP_K))
    devices[1] = 5  # one device gets all tokens of another one
    devices[2] = np.arange(4, 7)  # and one host too
    devices[3] = SIZE
    devices[6, :, 1] = -1
    return devices


def needs(devices):
    """Which device needs which token (sender, token, device)."""
    return (devices[..., None] == np.arange(SIZE)).any(axis=2)


def run(exchange, shape, function, *operands):
    """function(exchange, plan, *operands) on each device; operands and results are (SIZE, ...)."""

    def on_device(devices, *operands):
        plan = exchange.plan(devices[0])
        results = function(exchange, plan, *(x[0] for x in operands))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

    on = mesh(AxisType.Auto, AxisType.Auto, shape=shape)
    each = P(("x", "y"))
    sharded = jax.shard_map(on_device, mesh=on, in_specs=each, out_specs=each, check_vma=False)
    devices = jnp.asarray(choices(), jnp.int32)
    return jax.tree.map(np.asarray, jax.jit(sharded)(devices, *operands))


def hierarchy(names, shape, **kwargs):
    return make_hierarchy(names, ("x", "y"), shape, TOKENS, TOP_K, **kwargs)


def received_by(device, shape, ids):
    """The tokens that a device needs: by the sender's number in its host, by host, in order."""
    is_needed = needs(choices())[:, :, device]
    senders = np.arange(SIZE).reshape(shape).T.reshape(-1)
    return np.concatenate([ids[sender, is_needed[sender]] for sender in senders])


@pytest.mark.parametrize("names, shape", CASES)
def test_tokens_reach_their_devices_in_order_and_sums_come_back(names, shape):
    ids = np.arange(SIZE * TOKENS, dtype=np.int32).reshape(SIZE, TOKENS)
    x = np.random.default_rng(1).integers(-8, 8, size=(SIZE, TOKENS, D)).astype(np.float32)

    def there_and_back(exchange, plan, ids, x):
        received = exchange.send(plan, 0, ids, empty=-1)
        # Each device answers with its own multiple.
        factor = jax.lax.axis_index(exchange.axis).astype(jnp.float32) + 1
        back = exchange.give_back(plan, 0, exchange.send(plan, 0, x) * factor)
        return received, back

    exchange = hierarchy(names, shape)
    assert exchange.has_one_turn and exchange.axis == ("x", "y")
    received, back = run(exchange, shape, there_and_back, jnp.asarray(ids), jnp.asarray(x))
    is_needed = needs(choices())
    outer, inner = (name == "all_gather" for name in names)
    if inner:  # what is for one device of a host reaches all of them
        of_host = is_needed.reshape(SIZE, TOKENS, *shape).any(axis=3, keepdims=True)
        of_host = of_host | np.full_like(of_host, outer)
        is_needed = np.broadcast_to(of_host, (SIZE, TOKENS, *shape)).reshape(is_needed.shape)
    for device in range(SIZE):
        expected = received_by(device, shape, ids)
        found = received[device]
        np.testing.assert_array_equal(found[np.isin(found, expected)], expected)
        if not inner:
            assert (found >= 0).sum() == len(expected)
    # Small integers, whose sums are exact.
    factors = (is_needed * (np.arange(SIZE) + 1)).sum(axis=2)
    np.testing.assert_array_equal(back, x * factors[..., None])


@pytest.mark.parametrize(
    "names, shape",
    [
        (("all_to_all", "all_gather"), (4, 2)),
        (("all_to_all", "all_to_all"), (2, 4)),
        (("all_to_all", "all_to_all"), (4, 2)),
        (("all_to_all", "ragged_all_to_all"), (2, 4)),
        (("all_gather", "all_to_all"), (2, 4)),
    ],
)
def test_tokens_without_a_slot_go_in_further_turns(names, shape, monkeypatch):
    """Of the outer exchange, of the inner one, and of both."""
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    monkeypatch.setattr(_exchange, "HEADROOM", 0.4)
    exchange = hierarchy(names, shape)
    assert not exchange.has_one_turn
    x = np.random.default_rng(1).integers(-8, 8, size=(SIZE, TOKENS, D)).astype(np.float32)

    def all_turns(exchange, plan, x):
        def add(turn, state):
            out, visits = state
            received = exchange.send(plan, turn, jnp.ones((TOKENS,), jnp.int32), empty=0)
            back = exchange.give_back(plan, turn, exchange.send(plan, turn, x))
            return out + back, visits + received.sum()

        num_turns = exchange.num_turns(plan)
        start = jnp.zeros_like(x), jnp.int32(0)
        return jax.lax.fori_loop(0, num_turns, add, start), num_turns

    (found, visits), turns = run(exchange, shape, all_turns, jnp.asarray(x))
    is_needed = needs(choices())
    assert (turns == turns_of(exchange, names, shape, is_needed)).all() and turns[0] > 2
    if names[1] == "all_gather":
        of_host = is_needed.reshape(SIZE, TOKENS, *shape).any(axis=3)
        is_needed = np.repeat(of_host, shape[1], axis=2)
    else:
        np.testing.assert_array_equal(visits, is_needed.sum(axis=(0, 1)))
    np.testing.assert_array_equal(found, x * is_needed.sum(axis=2)[..., None])


def turns_of(exchange, names, shape, is_needed):
    """How many turns all tokens need, from what each device sends in each."""
    by_host = is_needed.reshape(SIZE, TOKENS, *shape)
    rank = np.cumsum(by_host.any(axis=3), axis=1) - 1  # of tokens for a host
    turn = rank // exchange.outer.slots if names[0] == "all_to_all" else np.zeros_like(rank)
    counts = []
    for t in range(turn.max() + 1):
        now = by_host & (turn == t)[..., None]
        # (host, number, token, to host, to device): a device passes on what its likes sent it.
        passed = now.reshape(*shape, TOKENS, *shape).sum(axis=(0, 2))
        inner = -(-passed.max() // exchange.inner.slots) if names[1] == "all_to_all" else 1
        counts.append(inner if now.any() else 0)
    return sum(counts)


@pytest.mark.parametrize("name, shape", [("all_to_all", (2, 4)), ("ragged_all_to_all", (4, 2))])
def test_sums_are_added_in_a_host_first(name, shape):
    """In f32 in the order of its devices, rounded to bf16, and then in f32 in that of the hosts."""
    answers = np.asarray([1, 2**-8, 2**-8, 2**-9, 3, 2**-7, 1, 2**-8]).astype(jnp.bfloat16)

    def answer(exchange, plan, _):
        me = jax.lax.axis_index(exchange.axis)
        y = jnp.full((exchange.received, 1), jnp.asarray(answers)[me])
        return exchange.give_back(plan, 0, y)

    found = run(hierarchy((name, name), shape), shape, answer, jnp.zeros((SIZE, 1)))[..., 0]
    parts = (needs(choices()) * answers.astype(np.float32)).reshape(SIZE, TOKENS, *shape)
    # NumPy adds one after another too, where it is told to.
    add = lambda x: functools.reduce(np.add, np.moveaxis(x, -1, 0))
    in_hosts = add(parts).astype(jnp.bfloat16).astype(np.float32)
    reference.assert_same_bits(found, add(in_hosts))
    assert not np.array_equal(add(in_hosts), add(parts.reshape(SIZE, TOKENS, SIZE)))


def test_sums_of_hosts_are_encoded_again():
    def encode(y):
        scale = jnp.full((y.shape[0], 1), 0.25, jnp.float32)
        return ScaledArray((y * 4).astype(jnp.float8_e4m3fn), scale)

    def answer(exchange, plan, _):
        return exchange.give_back(plan, 0, jnp.full((exchange.received, 128), 1.25), encode)

    shape = (2, 4)
    found = run(hierarchy(("all_to_all",) * 2, shape), shape, answer, jnp.zeros((SIZE, 1)))
    in_hosts = 1.25 * needs(choices()).reshape(SIZE, TOKENS, *shape).sum(axis=3)
    rounded = (in_hosts * 4).astype(jnp.float8_e4m3fn).astype(np.float32) / 4
    np.testing.assert_array_equal(found[..., 0], rounded.sum(axis=2))


def test_slots_are_those_of_the_tokens_that_a_host_and_a_device_need():
    """DeepSeek-V3 over 8 hosts of 8: 256 experts, top-8, in 4 of 8 groups."""
    make = functools.partial(make_hierarchy, (None, None), ("x", "y"), (8, 8), 8192, 8)
    limited = Routing(n_group=8, topk_group=4)
    assert limited.share_of_part(8) == 0.5
    exchange = make(host_share=limited.share_of_part(8))
    names = [type(make_exchange("all_to_all", "x", 8, 8, 8))] * 2
    assert [type(exchange.outer), type(exchange.inner)] == names
    assert exchange.outer.slots == 8192 * 4 // 8 * 1.125
    # 1 - (63/64)^8 of 8 * 8192 tokens, with headroom, in whole blocks of 128.
    assert exchange.inner.slots == 8832
    assert exchange.inner.tokens == exchange.outer.received == 8 * 4608
    # Without groups 1 - (7/8)^8 of the tokens.
    assert make().outer.slots == 6144
    assert Routing().share_of_part(8) == 1
    assert limited.share_of_part(16) == 0.5  # a group spans two parts
    assert limited.share_of_part(4) == pytest.approx(1 - (6 * 5 * 4 * 3) / (8 * 7 * 6 * 5))
    assert limited.share_of_part(3) == 1  # parts with pieces of groups
    bounded = make(max_slots=100)
    assert bounded.has_one_turn
    assert (bounded.outer.slots, bounded.inner.slots) == (800, 800)
