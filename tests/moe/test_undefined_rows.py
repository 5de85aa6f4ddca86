"""moe_layer with its experts along a mesh axis, which leaves rows of no group undefined.

Here its products and its copies of tokens leave NaN in these rows. No result and no gradient has
another bit for that.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import reference
import undefined_rows
from gated_activations import GPT_OSS
from meshes import mesh
from test_biases import biases_of
from test_expert_parallel import AUTO, D, E, F, problem
from test_shared_expert import shared_weights

from jax_fp8gemm import DEEPSEEK_V3
from jax_fp8gemm.moe import moe_layer
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec
from jax_fp8gemm.moe._parallel.layer import expert_parallel_on_mesh

SQUARE_COLUMNS = dataclasses.replace(DEEPSEEK_V3, wgrad_lhs_block=(128, 128), fp8_combine=True)
KEPT = dataclasses.replace(DEEPSEEK_V3, kept_gate_up="fp8")
INVARIANT = dataclasses.replace(DEEPSEEK_V3, batch_invariant=True)


def operands(skew):
    x, indices, weights, *experts, dout = problem(skew)
    return indices, (x, weights, *experts, biases_of(E, F, D), shared_weights()), dout


def layer(shape=(8,), dtype=jnp.float32, **how):
    """Returns a function of operands: the result and all gradients."""
    axes = ("x", "y") if len(shape) > 1 else "x"
    how |= dict(expert_axis=axes, mesh=mesh(*(AUTO,) * len(shape), shape=shape))

    @jax.jit
    def run(indices, operands, dout):
        def call(x, weights, w_gate_up, w_down, biases, shared):
            both = dict(biases=biases, shared_expert=shared)
            return moe_layer(x, (indices, weights), w_gate_up, w_down, **both, **how)

        operands, dout = jax.tree.map(lambda x: x.astype(dtype), (operands, dout))
        out, pullback = jax.vjp(call, *operands)
        return out, *pullback(dout)

    return run


def assert_nan_reaches_no_result(monkeypatch, how, skews):
    run = layer(**how)
    expected = [run(*operands(skew)) for skew in skews]
    expert_parallel_on_mesh.clear_cache()
    with_nan = undefined_rows.poison(monkeypatch)
    run = layer(**how)
    found = [run(*operands(skew)) for skew in skews]
    widths = {width for _, width in with_nan}
    assert widths == {2 * F, D, F, -(-D // 128)}  # gate_up; out, dx and copies; dh; their scales
    jax.tree.map(reference.assert_same_bits, found, expected)


@pytest.mark.parametrize(
    "how",
    [
        dict(exchange="all_gather", recipe=SQUARE_COLUMNS),
        dict(exchange="all_to_all", parts=2, recipe=INVARIANT),
        dict(exchange="ragged_all_to_all", parts=4, activation=GPT_OSS),
        dict(exchange="all_gather", parts=2, recipe=KEPT),
        dict(exchange=("all_to_all", "all_gather"), shape=(2, 4), dtype=jnp.bfloat16),
    ],
    ids=("all_gather", "all_to_all", "ragged_all_to_all", "kept_gate_up", "pair"),
)
def test_no_undefined_row_reaches_a_result(traced_anew, monkeypatch, how):
    """Of even choices, and of choices that all name an expert of one device."""
    assert_nan_reaches_no_result(monkeypatch, how, (0.0, 50.0))


@pytest.mark.parametrize("recipe", [DEEPSEEK_V3, KEPT], ids=("default", "kept_gate_up"))
def test_nor_does_one_of_a_later_turn(traced_anew, monkeypatch, recipe):
    """Of rows and of tokens."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    assert_nan_reaches_no_result(monkeypatch, dict(exchange="all_to_all", recipe=recipe), (5.0,))


def test_an_option_of_jax_that_looks_for_nan_finds_none(traced_anew, monkeypatch):
    """In what an eager gradient keeps between the passes."""
    with_nan = undefined_rows.poison(monkeypatch)
    indices, (x, weights, *experts, _, _), _ = operands(0.0)
    run = functools.partial(moe_layer, expert_axis="x", mesh=mesh(AUTO, shape=(8,)))
    loss = lambda x: run(x, (indices, weights), *experts).sum()
    with jax.debug_nans(True):
        jax.block_until_ready(jax.grad(loss)(x))
    assert {width for _, width in with_nan} == {D, -(-D // 128)}  # of copies, which no pass keeps
    expert_parallel_on_mesh.clear_cache()
    with jax.debug_nans(False):
        jax.block_until_ready(jax.grad(loss)(x))
    assert {width for _, width in with_nan} > {D, -(-D // 128)}
