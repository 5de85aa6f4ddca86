"""Programs for any number of rows, exported with a symbolic extent: the forward pass."""

import functools

import jax
import jax.numpy as jnp
import pytest
import reference
from errors import without_annotation_checks

from jax_fp8gemm import EXPORT_CHECKS, FallbackWarning, matmul, quantize, ragged_dot

K, N = 256, 384
W = jnp.cos(jnp.arange(2.0 * K * N)).reshape(2, K, N)
SIZES = jnp.asarray([3, 4])
CALLS = {
    "matmul": lambda x: matmul(x, W[0]),
    "matmul, weights quantised once": lambda x: matmul(
        x, quantize(W[0], block=(128, 128), with_transpose="only")
    ),
    "ragged_dot": lambda x: ragged_dot(x, W, SIZES),
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
        assert reference.calc_diff(again.call(x), jax.jit(call)(x)) < 1e-9
