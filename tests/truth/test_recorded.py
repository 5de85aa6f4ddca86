"""The bit model and the reference against what an H200 computed (tests/record_h200.py)."""

import json

import bit_model
import numpy as np
import pytest
import record_h200
import reference

CASES = record_h200.cases()


@pytest.fixture(scope="module")
def recorded():
    assert record_h200.RECORDED.exists(), "run tests/record_h200.py on an H200 first"
    entries = json.loads(record_h200.RECORDED.read_text())["cases"]
    return {entry["name"]: entry for entry in entries}


def test_every_case_is_recorded_once(recorded):
    assert list(recorded) == [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model_predicts_the_recorded_bits(recorded, case):
    """Every element of the small cases, by hash; a sample of the real shapes."""
    entry, operands = recorded[case.name], case.operands()
    assert record_h200.digest(*operands) == entry["inputs"], "the inputs changed: record again"
    rows, cols = case.elements()
    sample = record_h200.decode(entry["sample"])
    predicted = bit_model.gemm_elements(*operands, rows, cols)
    reference.assert_same_bits(predicted, sample, case.name)
    if case.whole:
        assert record_h200.digest(bit_model.gemm(*operands)) == entry["out"]


# Where products cancel, what truncation leaves is large beside the result.
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.data != "cancelling"], ids=lambda case: case.name
)
def test_recorded_results_are_close_to_float64(recorded, case):
    rows, cols = case.elements()
    lhs, lhs_scale, rhs, rhs_scale = case.operands()
    lhs, rhs = reference.dequantize(lhs, lhs_scale), reference.dequantize(rhs, rhs_scale)
    sample = record_h200.decode(recorded[case.name]["sample"])
    exact = np.einsum("ij,ij->i", lhs[rows], rhs[cols])
    assert reference.calc_diff(sample, exact) < 1e-5
