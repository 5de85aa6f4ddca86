"""Controls of examples/train_moe: how they round and multiply on a GPU."""

import pathlib
import runpy
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.gpu

FP4 = ml_dtypes.float4_e2m1fn
CONTROLS = pathlib.Path(__file__).parents[2] / "examples" / "train_moe" / "controls.py"


def test_no_promotion_runs_by_cublaslt_in_fp8():
    """All three products of a step, of operands whose own layouts cuBLASLt takes and does not."""
    controls = runpy.run_path(str(CONTROLS))
    product, control = controls["product"], controls["CONTROLS"]["no_promotion"]
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 384)))
    loss = lambda lhs, rhs: (product(control, lhs, rhs, None).astype(jnp.float32) ** 2).sum()
    options = dict(xla_gpu_enable_triton_gemm=False)
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(lhs, rhs)
    text = lowered.compile(compiler_options=options).as_text()
    assert text.count("__cublas$lt$matmul$f8") >= 3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("E4M3", ml_dtypes.float8_e4m3fn), ("E5M2", ml_dtypes.float8_e5m2), ("E2M1", FP4)],
)
def test_a_control_has_the_values_of_its_format(kind, dtype):
    """XLA on a GPU may drop a conversion to FP8 and back, and then nothing is rounded."""
    controls = runpy.run_path(str(CONTROLS))
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) * largest / 3
    want = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
    found = jax.jit(partial(controls["to_format"], kind=controls[kind]))(x)
    np.testing.assert_array_equal(np.asarray(found), want)


def test_a_control_rounds_to_e4m3():
    """XLA on a GPU may drop a conversion to FP8 and back, and then nothing is rounded."""
    controls = runpy.run_path(str(CONTROLS))
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    scale = np.float32(np.abs(x).max() / np.float32(448))
    want = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    found = np.asarray(jax.jit(controls["per_tensor"], static_argnums=1)(x, -1))
    # A quotient that lies between two values may round to either, as the division's last bit says.
    assert np.mean(~np.isclose(found, want, rtol=1e-6)) < 1e-3  # scales may differ in the last bit
    np.testing.assert_allclose(found, want, rtol=0.125)
    assert 0.01 < np.linalg.norm(found - x) / np.linalg.norm(x) < 0.05
