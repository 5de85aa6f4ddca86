"""Programs for any number of rows, exported with a symbolic extent."""

import functools

import jax
import jax.numpy as jnp
import pytest
import reference
from errors import raises, without_annotation_checks

from jax_fp8gemm import (
    EXPORT_CHECKS,
    FallbackWarning,
    Recipe,
    ScaledArray,
    matmul,
    moe,
    quantize,
    ragged_dot,
    scaled_ragged_dot,
)

K, N = 256, 384
W = jnp.cos(jnp.arange(2.0 * K * N)).reshape(2, K, N)
SIZES = jnp.asarray([3, 4])
BF16_INVARIANT = Recipe(fwd=None, batch_invariant=True)


def gradients(op):
    """A function of x: the gradients of x and of the weights W."""
    loss = lambda x, w: (op(x, w) ** 2).sum()
    return lambda x: jax.grad(loss, (0, 1))(x, W)


CALLS = {
    "matmul": lambda x: matmul(x, W[0]),
    "matmul, weights quantised once": lambda x: matmul(
        x, quantize(W[0], block=(128, 128), with_transpose="only")
    ),
    "matmul, a leading dimension": lambda x: matmul(x[:, None], W[0]),
    "matmul, as many as matrices": lambda x: matmul(x[:, None, None], W),
    "ragged_dot": lambda x: ragged_dot(x, W, SIZES),
    "gradients of matmul": gradients(lambda x, w: matmul(x, w[0])),
    "gradients of moe_layer": gradients(
        lambda x, w: moe.moe_layer(x, x[:, :2], w, jnp.swapaxes(w[:, :, : N // 2], 1, 2), top_k=1)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
def test_one_program_serves_any_number_of_rows(call):
    # A bound, because the rows of a grouped product are numbered in int32.
    (m,) = jax.export.symbolic_shape("m", constraints=["m <= 65536"])
    export = functools.partial(
        jax.export.export, platforms=("cpu", "cuda"), disabled_checks=EXPORT_CHECKS
    )
    with without_annotation_checks():  # an extent is annotated as an int
        exported = export(jax.jit(call))(jax.ShapeDtypeStruct((m, K), jnp.float32))
    assert "custom_call @jax_fp8gemm_" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    for rows in (8, 130):
        x = jnp.sin(jnp.arange(1.0 * rows * K)).reshape(rows, K)
        found, expected = (jax.tree.leaves(run(x)) for run in (again.call, jax.jit(call)))
        for y, z in zip(found, expected, strict=True):
            assert reference.calc_diff(y, z) < 1e-9


def test_what_a_symbolic_number_of_rows_does_not_have():
    (m,) = jax.export.symbolic_shape("m")
    call = gradients(lambda x, w: matmul(x, w[0], recipe=BF16_INVARIANT))
    with without_annotation_checks(), raises(NotImplementedError, match="a known number of elem"):
        jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct((m, K), jnp.float32))


def test_a_capacity_needs_a_known_number_of_tokens():
    (m,) = jax.export.symbolic_shape("m", constraints=["m <= 4096"])
    down = jnp.swapaxes(W[:, :, : N // 2], 1, 2)
    call = lambda x: moe.moe_layer(x, x[:, :2], W, down, top_k=1, capacity_factor=1.0)
    message = "^moe_layer: with a capacity_factor the number of tokens must be known; got m choices"
    with without_annotation_checks(), raises(ValueError, match=message):
        jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct((m, K), jnp.float32))


def export_scaled_ragged_dot(lead, g, platform):
    """Exports the product of lhs (*lead, K) with g matrices."""
    of = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)

    def call(x, x_scale, w, w_scale, sizes):
        lhs, rhs = ScaledArray(x, x_scale), ScaledArray(w, w_scale, block=(128, 128))
        return scaled_ragged_dot(lhs, rhs, sizes)

    operands = (
        *(of((*lead, K), jnp.float8_e4m3fn), of((*lead, K // 128))),
        *(of((g, N, K), jnp.float8_e4m3fn), of((g, N // 128, K // 128))),
        of((g,), jnp.int32),
    )
    with without_annotation_checks():
        return jax.export.export(
            jax.jit(call), platforms=(platform,), disabled_checks=EXPORT_CHECKS
        )(*operands)


def test_rows_of_groups_need_a_bound():
    (m,) = jax.export.symbolic_shape("m")
    message = r"m \+ 127 g must be below 2\^31; got m \+ 1016, .*constraints=\[\"m <= 65536\"\]"
    with raises(ValueError, match=message):
        export_scaled_ragged_dot((m,), 8, "cuda")


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
def test_only_the_reference_has_a_masked_form_of_any_size():
    """Its kernel is told the number of groups, and the rows of each."""
    (m,) = jax.export.symbolic_shape("m", constraints=["m <= 4096"])
    (g,) = jax.export.symbolic_shape("g", constraints=["g <= 64"])
    assert export_scaled_ragged_dot((m,), 8, "cuda")
    for lead, groups in (((8, m), 8), ((g, 16), g)):
        with raises(ValueError, match="grouped_gemm: g and, of lhs .*, max_m must be numbers"):
            export_scaled_ragged_dot(lead, groups, "cuda")
        assert export_scaled_ragged_dot(lead, groups, "cpu")
