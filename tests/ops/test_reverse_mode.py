"""Derivatives that the ops do not have, and what is said of them; those they have stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

X, W, SIZES = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.asarray([2, 2])
MATRICES, EXPERTS = jnp.ones((2, 8, 8)), (jnp.ones((2, 8, 16)), jnp.ones((2, 8, 8)))
CHOICES, WEIGHTS = jnp.arange(4, dtype=jnp.int32)[:, None], jnp.ones((4, 1))
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
layer = lambda x, **kwargs: moe.moe_layer(x, x[:, :2], *EXPERTS, top_k=1, **kwargs)
matmul = lambda x: fp8.matmul(x, W)
OPS = {
    "matmul": ("matmul", matmul),
    "matmul of batches": ("matmul", lambda x: fp8.matmul(x[None], jnp.stack([W, W]))),
    "matmul by weights": ("matmul", lambda x: fp8.matmul(X, x.T)),
    "dot_general": ("matmul", lambda x: fp8.dot_general(x, W, (((1,), (0,)), ((), ())))),
    "ragged_dot": ("ragged_dot", lambda x: fp8.ragged_dot(x, MATRICES, SIZES)),
    "ragged_dot, bf16": (
        "ragged_dot",
        lambda x: fp8.ragged_dot(x, MATRICES, SIZES, recipe=fp8.BF16),
    ),
    "ragged_dot_general": (
        "ragged_dot_general",
        lambda x: fp8.ragged_dot_general(x, x, SIZES, OVER_ROWS),
    ),
    "moe_mlp": ("moe_mlp", lambda x: moe.moe_mlp(x, *EXPERTS, SIZES)),
    "moe_layer": ("moe_layer", layer),
    "moe_layer, bf16": ("(un)?permute", functools.partial(layer, recipe=fp8.BF16)),
    "permute": ("permute", lambda x: moe.permute(x, CHOICES, 2)[0]),
    "unpermute": ("unpermute", lambda x: moe.unpermute(x, CHOICES, WEIGHTS)),
    "jit": ("matmul", jax.jit(matmul)),
    "vmap": ("matmul", jax.vmap(lambda x: matmul(x[None])[0])),
    "checkpoint": ("matmul", jax.checkpoint(matmul)),
    "scan": ("matmul", lambda x: jax.lax.scan(lambda c, _: (matmul(c), None), x, None, 2)[0]),
}
FORWARD = {
    "jit of jvp": lambda op: jax.jit(lambda x: jax.jvp(op, (x,), (x,)))(X),
    "linearize": lambda op: jax.linearize(op, X)[1](X),
}
# Their operands are what the backward pass reads: JAX's own sentence says that forward mode fails.
UNMARKED = ("ragged_dot, bf16", "unpermute")
each_op = pytest.mark.parametrize("name, op", OPS.values(), ids=OPS.keys())


FORWARD_MESSAGE = (
    r": must be differentiated in reverse mode; got forward mode \(jax.jvp, jax.jacfwd, "
    r"jax.linearize\). Use jax.grad, jax.vjp or jax.jacrev."
)


@each_op
def test_forward_mode(request, name, op):
    if any(f"[{unmarked}]" in request.node.name for unmarked in UNMARKED):
        with raises(TypeError, match="forward-mode"):
            jax.jvp(op, (X,), (X,))
        return
    with raises(NotImplementedError, match=f"^{name}{FORWARD_MESSAGE}"):
        jax.jvp(op, (X,), (X,))


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("op", ["matmul", "jit", "checkpoint", "scan"])
def test_ways_into_forward_mode(op, mode):
    with raises(NotImplementedError, match="^matmul" + FORWARD_MESSAGE):
        FORWARD[mode](OPS[op][1])


def test_jacfwd():
    with raises(NotImplementedError, match="^matmul: must be differentiated in reverse mode; got"):
        jax.jacfwd(matmul)(X)


@each_op
def test_linear_transpose(name, op):
    message = f"^{name}: must be differentiated in reverse mode; got jax.linear_transpose. Use"
    with raises(NotImplementedError, match=message):
        jax.linear_transpose(op, X)(op(X))


scanned = OPS["scan"][1]
REVERSE = {
    "jit": OPS["jit"][1],
    "checkpoint of scan": jax.checkpoint(scanned),
    "vmap of scan": jax.vmap(lambda x: scanned(x[None])[0]),
}


@pytest.mark.parametrize("function", REVERSE.values(), ids=REVERSE.keys())
def test_reverse_mode(function):
    """Of products of ones: the gradient of their sum is what a row of ones is multiplied by."""
    loss = lambda x: function(x).sum()
    expected = np.full(X.shape, float(loss(X)) / X.size)
    np.testing.assert_allclose(jax.grad(loss)(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), expected, rtol=1e-6)
    assert jax.jacrev(function)(X).shape == X.shape * 2
    batch = jnp.stack([X, X])
    for gradients in (jax.vmap(jax.grad(loss)), jax.grad(lambda x: jax.vmap(loss)(x).sum())):
        np.testing.assert_allclose(gradients(batch), np.stack([expected] * 2), rtol=1e-6)


def test_programs_hold_no_trace_of_it():
    text = jax.jit(jax.grad(lambda x: matmul(x).sum())).lower(X).as_text(debug_info=False)
    assert "reverse_mode" not in text


def test_operands_are_kept_as_they_are():
    """What JAX's own product keeps for the backward pass is its operands, not marked copies."""
    product = jax.jit(functools.partial(fp8.ragged_dot, recipe=fp8.BF16))
    _, pullback = jax.vjp(lambda x: product(x, MATRICES, SIZES), X)
    leaves = [x for x in jax.tree.leaves(pullback) if hasattr(x, "unsafe_buffer_pointer")]
    pointers = {x.unsafe_buffer_pointer() for x in leaves}
    assert pointers > {x.unsafe_buffer_pointer() for x in (X, MATRICES)}
