"""Exchanges of tokens along an axis of four devices, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel.exchange import NAMES, choose_exchange, make_exchange

SIZE, TOKENS, TOP_K, D = 4, 24, 2, 3


def random_devices(seed=0):
    """The device of each choice of each device's tokens; SIZE is none."""
    rng = np.random.default_rng(seed)
    devices = rng.integers(0, SIZE + 1, size=(SIZE, TOKENS, TOP_K))
    devices[1] = 2  # one peer gets all tokens of one device
    devices[3] = SIZE
    return devices


def run(name, function, *operands, **static):
    """function(exchange, plan, *operands) on each device; operands and results are (SIZE, ...)."""
    exchange = make_exchange(name, "x", SIZE, TOKENS, TOP_K)
    exchange = dataclasses.replace(exchange, **static)

    def on_device(devices, *operands):
        plan = exchange.plan(devices[0])
        results = function(exchange, plan, *(x[0] for x in operands))
        return jax.tree.map(lambda x: x[None], results)

    sharded = jax.shard_map(
        on_device, mesh=mesh(AxisType.Auto), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    devices = jnp.asarray(random_devices(), jnp.int32)
    return jax.tree.map(np.asarray, jax.jit(sharded)(devices, *operands))


def received_by(device, x):
    """The tokens (SIZE, TOKENS, ...) that a device needs, by sender, in order."""
    needs = (random_devices() == device).any(axis=2)
    return np.concatenate([x[sender, needs[sender]] for sender in range(SIZE)])


@pytest.mark.parametrize("name", NAMES)
def test_each_device_receives_the_tokens_it_needs_in_order(name):
    ids = jnp.arange(SIZE * TOKENS, dtype=jnp.int32).reshape(SIZE, TOKENS)
    found = run(name, lambda exchange, plan, x: exchange.send(plan, 0, x, empty=-1), ids)
    for device in range(SIZE):
        needed = received_by(device, np.asarray(ids))
        kept = found[device][np.isin(found[device], needed)]  # all_gather brings others too
        np.testing.assert_array_equal(kept, needed)
        if name != "all_gather":
            assert (found[device] >= 0).sum() == len(needed)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_back_is_the_sum_over_devices(name):
    x = np.random.default_rng(1).normal(size=(SIZE, TOKENS, D)).astype(np.float32)

    def there_and_back(exchange, plan, x):
        received = exchange.send(plan, 0, x)
        # Each device answers with its own multiple.
        factor = jax.lax.axis_index("x").astype(jnp.float32) + 1
        return exchange.give_back(plan, 0, received * factor)

    found = run(name, there_and_back, jnp.asarray(x))
    devices = random_devices()
    for sender, token in np.ndindex(SIZE, TOKENS):
        peers = set(range(SIZE)) if name == "all_gather" else set(devices[sender, token]) - {SIZE}
        factor = sum(peer + 1 for peer in peers)
        np.testing.assert_allclose(found[sender, token], x[sender, token] * factor, rtol=1e-6)


@pytest.mark.parametrize("slots", [5, 24])
def test_tokens_without_a_slot_go_in_another_turn(slots):
    x = np.random.default_rng(1).normal(size=(SIZE, TOKENS, D)).astype(np.float32)
    num_turns = -(-TOKENS // slots)

    def all_turns(exchange, plan, x):
        back = lambda turn: exchange.give_back(plan, turn, exchange.send(plan, turn, x))
        return sum(back(turn) for turn in range(num_turns)), jnp.int32(exchange.num_turns(plan))

    found, turns = run("all_to_all", all_turns, jnp.asarray(x), slots=slots, has_one_turn=False)
    assert (turns == num_turns).all()
    needed = [[len(set(choices) - {SIZE}) for choices in rows] for rows in random_devices()]
    np.testing.assert_allclose(found, x * np.asarray(needed)[..., None], rtol=1e-6)


def test_sums_are_in_f32_and_in_the_order_of_the_devices():
    answers = jnp.asarray([1.0, 2.0**-8, 2.0**-8, 1.0], jnp.bfloat16)
    for name in NAMES:

        def answer(exchange, plan, _):
            y = jnp.full((exchange.received, 1), answers[jax.lax.axis_index("x")])
            return exchange.give_back(plan, 0, y)

        out = run(name, answer, jnp.zeros((SIZE, 1)))
        devices = random_devices()
        for sender, token in np.ndindex(SIZE, TOKENS):
            peers = range(SIZE) if name == "all_gather" else set(devices[sender, token]) - {SIZE}
            expected = functools.reduce(
                np.add, [np.float32(answers[peer]) for peer in sorted(peers)], np.float32(0)
            )
            reference.assert_same_bits(out[sender, token, 0], expected)


def test_choice_by_the_bytes_that_move_and_the_rates(monkeypatch):
    choose = lambda size, top_k: make_exchange(None, "x", size, 8192, top_k)
    assert type(choose(4, 8)) is type(make_exchange("all_gather", "x", 4, 8192, 8))
    wide = choose(32, 8)
    assert type(wide) is type(make_exchange("all_to_all", "x", 32, 8192, 8))
    # 1 - (31/32)^8 of the tokens, with headroom, in whole blocks of 128.
    assert wide.slots == 2176
    assert choose_exchange(4096, 8192) == "all_to_all"
    assert choose_exchange(8192, 8192) == "all_gather"
    slower = _exchange.Rate(_exchange.RATES["all_gather"].bytes_per_second / 3, "this test")
    monkeypatch.setitem(_exchange.RATES, "all_to_all", slower)
    assert choose_exchange(4096, 8192) == "all_gather"


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_ragged_all_to_all_is_never_chosen(size, top_k, tokens):
    # It needs peers whose memory a GPU can write to. Sizes do not tell whether they are such peers.
    assert type(make_exchange(None, "x", size, tokens, top_k)) is not _exchange.RaggedAllToAll
    named = make_exchange("ragged_all_to_all", "x", size, tokens, top_k)
    assert type(named) is _exchange.RaggedAllToAll
