"""`python -m jax_fp8gemm bench`: our kernels against their floors and their peers."""

from jax_fp8gemm.bench._cli import main as main
