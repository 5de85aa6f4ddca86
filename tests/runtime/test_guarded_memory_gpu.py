"""No kernel reads past its operands, by tensor maps and bulk copies neither."""

import gpu_cases
import guarded_program
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op", guarded_program.OPS)
def test_reads_nothing_past_the_end(op):
    run = gpu_cases.run_program(op, "--count", "40", program="guarded_program.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["40"]


@pytest.mark.parametrize(
    "op, operand", [("quantize", 0), ("rows_by_squares", 0), ("rows_by_squares", 1)]
)
def test_a_read_past_the_end_faults(op, operand):
    """The check itself: of a quantiser, and of values and scales in a product."""
    run = gpu_cases.run_program(op, "--past-end", str(operand), program="guarded_program.py")
    assert run.returncode != 0
    assert "ILLEGAL_ADDRESS" in run.stderr, run.stderr
