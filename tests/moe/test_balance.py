"""The losses and the bias of balance against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_moe import random

from jax_fp8gemm.moe import load_balancing_loss, route, update_balance_bias, z_loss

B, S, E, TOP_K = 2, 32, 8, 3
LOGITS = random(B, S, E, seed=1, scale=2.0)
ROUNDINGS = 1e-6  # of f32, in sums of 64 tokens

SCORES = {
    "softmax": np.exp,  # over their sum
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}
scorings = pytest.mark.parametrize("scoring", SCORES)


def balance(logits, load, scoring):
    """Switch Transformers, equations 4 to 6; with sigmoid DeepSeek-V3's, equations 17 to 20."""
    scores = SCORES[scoring](np.asarray(logits, np.float64).reshape(-1, E))
    mean = (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
    return E * (load / load.sum() * mean).sum()


@scorings
def test_load_balancing_loss(scoring):
    _, _, load = route(LOGITS, TOP_K, scoring=scoring, return_load=True)
    found = jax.jit(load_balancing_loss, static_argnames="scoring")(LOGITS, load, scoring=scoring)
    assert (found.shape, found.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(found, balance(LOGITS, np.asarray(load), scoring), rtol=ROUNDINGS)


def test_the_loss_of_transformers_mixtral_is_top_k_times_ours():
    """Its load_balancing_loss_func: the mean over tokens of one-hot choices (top_k, experts)."""
    indices, _, load = route(LOGITS, TOP_K, return_load=True)
    one_hot = np.eye(E)[np.asarray(indices).reshape(-1, TOP_K)]
    logits = np.asarray(LOGITS, np.float64).reshape(-1, E)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = (one_hot.mean(axis=0) * probabilities.mean(axis=0)[None]).sum() * E
    np.testing.assert_allclose(load_balancing_loss(LOGITS, load) * TOP_K, expected, rtol=ROUNDINGS)


@scorings
def test_even_scores_and_loads_have_a_loss_of_one(scoring):
    loss = load_balancing_loss(jnp.zeros((4, E)), jnp.full(E, 2), scoring=scoring)
    np.testing.assert_allclose(loss, 1, rtol=ROUNDINGS)
    one = jnp.zeros(E, jnp.int32).at[3].set(4)
    skewed = load_balancing_loss(100 * jnp.tile(jax.nn.one_hot(3, E), (4, 1)), one)
    np.testing.assert_allclose(skewed, E, rtol=ROUNDINGS)


def test_the_loss_of_each_sequence():
    route_one = lambda logits: route(logits, TOP_K, return_load=True)[2]
    loads = jax.vmap(route_one)(LOGITS)
    assert loads.shape == (B, E)
    found = jax.vmap(load_balancing_loss)(LOGITS, loads)
    expected = [balance(LOGITS[i], np.asarray(loads[i]), "softmax") for i in range(B)]
    np.testing.assert_allclose(found, expected, rtol=ROUNDINGS)


@pytest.mark.parametrize("loss", ["balance", "z"])
def test_gradients_are_those_of_differences(loss):
    _, _, load = route(LOGITS, TOP_K, return_load=True)
    run = (lambda x: load_balancing_loss(x, load)) if loss == "balance" else z_loss
    logits, direction = np.asarray(LOGITS, np.float64), np.asarray(random(B, S, E, seed=2))

    def along(step):
        x = logits + step * direction
        if loss == "balance":
            return balance(x, np.asarray(load), "softmax")
        return (np.log(np.exp(x).sum(axis=-1)) ** 2).mean()

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    np.testing.assert_allclose((jax.grad(run)(LOGITS) * direction).sum(), slope, rtol=1e-5)


def test_z_loss():
    exact = np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(axis=-1))
    found = jax.jit(z_loss)(LOGITS)
    assert (found.shape, found.dtype) == ((), jnp.float32)
    np.testing.assert_allclose(found, (exact**2).mean(), rtol=ROUNDINGS)
    np.testing.assert_allclose(z_loss(jnp.full((3, E), 1e4)), 1e8, rtol=1e-3)  # no overflow
    np.testing.assert_allclose(z_loss(LOGITS.astype(jnp.bfloat16)), (exact**2).mean(), rtol=1e-2)


def test_losses_of_no_tokens():
    no = jnp.zeros(E, jnp.int32)
    assert load_balancing_loss(LOGITS[:, :0], no) == 0 and z_loss(LOGITS[:, :0]) == 0


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type):
    where = mesh(axis_type, axis_type, shape=(2, 4))
    place = lambda x, *spec: jax.device_put(np.asarray(x), NamedSharding(where, P(*spec)))
    _, _, load = route(LOGITS, TOP_K, return_load=True)
    expected = balance(LOGITS, np.asarray(load), "softmax")
    logits, load = place(LOGITS, "x", "y"), place(load, "y")
    np.testing.assert_allclose(jax.jit(load_balancing_loss)(logits, load), expected, rtol=ROUNDINGS)
    np.testing.assert_allclose(jax.jit(z_loss)(logits), z_loss(LOGITS), rtol=ROUNDINGS)
    found = jax.jit(update_balance_bias)(place(jnp.zeros(E), "y"), load, 0.5)
    np.testing.assert_array_equal(found, update_balance_bias(jnp.zeros(E), jnp.asarray(load), 0.5))


@pytest.mark.parametrize(
    "load, signs",
    [
        ([3, 1, 2, 2], [-1, 1, 0, 0]),
        ([0, 0, 0, 1], [1, 1, 1, -1]),  # a mean of 1/4
        ([2, 2, 2, 1], [-1, -1, -1, 1]),  # of 7/4
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        # f32 would take these for their mean.
        ([2**28 + 1, 2**28, 2**28, 2**28 - 1], [-1, 0, 0, 1]),
    ],
)
def test_update_balance_bias(load, signs):
    bias = random(4, seed=3)
    run = jax.jit(update_balance_bias)
    for rate in (0.25, np.float64(0.25), jnp.float32(0.25)):
        found = run(bias, jnp.asarray(load), rate)
        step = np.array(signs, np.float32) / 4
        np.testing.assert_array_equal(found, np.asarray(bias) + step)


def test_the_bias_of_each_layer():
    bias = random(3, E, seed=3).astype(jnp.bfloat16)
    load = np.random.default_rng(0).integers(0, 9, (3, E))
    found = update_balance_bias(bias, load, 0.5)
    assert found.dtype == jnp.bfloat16
    expected = np.asarray(bias, np.float32) + 0.5 * np.sign(load.mean(axis=1)[:, None] - load)
    np.testing.assert_array_equal(found, expected.astype(bias.dtype))


def test_steps_of_the_bias_even_the_load():
    logits = LOGITS + jnp.asarray([4.0, *[0] * (E - 1)])[None, None]
    bias, uneven = jnp.zeros(E), []
    how = dict(scoring="sigmoid", return_load=True)
    for _ in range(100):
        *_, load = route(logits, TOP_K, bias=bias, **how)
        uneven.append(int(load.max() - load.min()))
        bias = update_balance_bias(bias, load, 0.01)
    assert uneven[0] > 40 and uneven[-1] < 10


NO_LOAD = jnp.zeros(E)
LOAD = jnp.zeros(E, jnp.int32)


@pytest.mark.parametrize(
    "run, args, error, message",
    [
        (load_balancing_loss, (LOGITS, NO_LOAD), TypeError, "load must be integers; got load f32"),
        (load_balancing_loss, (LOGITS, LOAD[1:]), ValueError,
         r"a count for each expert of logits f32\[2,32,8\]; got load s32\[7\]"),
        (load_balancing_loss, (LOAD, LOAD), TypeError, "logits must be bf16, f16 or f32; got"),
        (load_balancing_loss, (LOGITS[..., :0], LOAD[:0]), ValueError, "at least one expert; got"),
        (z_loss, (1.0,), TypeError, "logits must be an array; got float"),
        (z_loss, (jnp.ones(()),), ValueError, r"logits must be \(\.\.\., num_experts\); got"),
        (update_balance_bias, (NO_LOAD, LOAD[1:], 1.0), ValueError, r"of bias f32\[8\]; got load"),
        (update_balance_bias, (LOAD, LOAD, 1.0), TypeError, "bias must be bf16, f16 or f32; got"),
        (update_balance_bias, (NO_LOAD, LOAD, "1"), TypeError, "rate must be a number; got '1'"),
        (update_balance_bias, (NO_LOAD, LOAD, NO_LOAD), ValueError, "rate must be a scalar; got"),
    ],
)  # fmt: skip
def test_bad_arguments_raise(run, args, error, message):
    with raises(error, match=f"^{run.__name__}: .*{message}"):
        run(*args)


def test_a_bad_scoring_raises():
    with raises(ValueError, match="load_balancing_loss: scoring must be .*; got 'relu'"):
        load_balancing_loss(LOGITS, LOAD, scoring="relu")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_loads_of_any_integers(dtype):
    load = jnp.asarray([0, 3, 9, 4], dtype)
    found = update_balance_bias(jnp.zeros(4), load, 0.5)
    np.testing.assert_array_equal(found, [0.5, 0.5, -0.5, 0])
