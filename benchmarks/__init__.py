"""Our kernels against their floors and their peers: `python -m jax_fp8gemm bench`."""

from benchmarks.commands import main as main
