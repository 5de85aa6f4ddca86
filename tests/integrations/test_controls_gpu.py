"""A control of examples/train_moe whose sums stay in the tensor core."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.gpu

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
