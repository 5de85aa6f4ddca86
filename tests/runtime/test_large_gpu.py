"""Arrays of more than 2^31 elements, in processes of their own."""

import fcntl
import os
import tempfile
from pathlib import Path

import gpu_cases
import large_program
import pytest

pytestmark = pytest.mark.gpu

# One at a time: several of these processes and those of other tests would fill the GPU's memory.
LOCK = Path(tempfile.gettempdir()) / f"jax_fp8gemm-large-{os.getuid()}.lock"


@pytest.mark.parametrize("case", large_program.CASES)
def test_the_last_rows_have_the_bits_that_they_have_alone(case):
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = gpu_cases.run_program(case, program="large_program.py")
    assert run.returncode == 0, run.stderr
