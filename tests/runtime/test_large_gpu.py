"""Arrays of more than 2^31 elements, in processes of their own."""

import gpu_cases
import large_program
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", large_program.CASES)
def test_the_last_rows_have_the_bits_that_they_have_alone(case):
    run = gpu_cases.run_program(case, program="large_program.py")
    assert run.returncode == 0, run.stderr
