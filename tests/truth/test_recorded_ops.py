"""The emulation of every op against what an H200 computed (tests/record_ops.py)."""

import json

import jax
import numpy as np
import pytest
import record_approximations
import record_h200
import record_ops

import jax_fp8gemm as jf
from jax_fp8gemm._emulation import approximations

CASES = record_ops.cases()


@pytest.fixture(scope="module")
def recorded():
    entries = json.loads(record_ops.RECORDED.read_text())["cases"]
    return {entry["name"]: entry for entry in entries}


def test_every_case_is_recorded_once(recorded):
    assert list(recorded) == [case.name for case in CASES]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emulation_has_the_recorded_bits(recorded, case):
    """Every bit of every result, by hash: those of NaN too. The sample says where they differ."""
    entry = record_ops.entry(case, case.run("emulate"))
    assert entry["sample"] == recorded[case.name]["sample"]
    assert entry["out"] == recorded[case.name]["out"]


@pytest.mark.parametrize("case", record_h200.cases(), ids=lambda case: case.name)
def test_emulation_has_the_recorded_bits_of_products(case):
    entries = json.loads(record_h200.RECORDED.read_text())["cases"]
    out = {entry["name"]: entry["out"] for entry in entries}[case.name]
    lhs, lhs_scale, rhs, rhs_scale = case.operands()
    emulated = jf.scaled_matmul(
        jf.ScaledArray(lhs, lhs_scale),
        jf.ScaledArray(rhs, rhs_scale, block=(1 if case.is_1d1d else 128, 128)),
        out_dtype=np.float32,
        implementation="emulate",
    )
    assert record_h200.digest(np.asarray(emulated)) == out


@pytest.mark.parametrize("name", record_approximations.INPUTS)
def test_approximations_have_the_recorded_bits(name):
    instruction, inputs = record_approximations.INPUTS[name]
    recorded = json.loads(record_approximations.RECORDED.read_text())
    out = jax.jit(getattr(approximations, instruction))(inputs().view(np.uint32))
    assert record_approximations.digest(np.asarray(out).view(np.float32)) == recorded[name]
