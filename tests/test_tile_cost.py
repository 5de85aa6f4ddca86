"""The predicted time of a product: in step with what was measured."""

import json
import pathlib

import pytest

from jax_fp8gemm import _tile_choice, _tile_cost

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
DENSE = RESULTS / "nvidia_h200" / "dense.json"


# The model may be off by this much; its purpose is to rank configs. Where bytes or launches decide
# (small m), times are a few microseconds and the ramps at both ends a large part of them.
@pytest.mark.parametrize(("smallest_m", "tolerance"), [(1024, 0.25), (8, 0.35)])
def test_model_predicts_the_measured_times(smallest_m, tolerance):
    rows = json.loads(DENSE.read_text())["rows"]
    compared = 0
    for row in rows:
        shape = row["m"], row["n"], row["k"]
        config = _tile_choice.choose(*shape, is_1d1d=False, out_f32=False, accumulate=False)
        if row["m"] < smallest_m or not row["config"].startswith(
            f"{config.block_m}x{config.block_n}/"
        ):
            continue
        predicted = _tile_cost.time_us(config, *shape, False, 2, 132)
        assert predicted == pytest.approx(row["us"], rel=tolerance), (shape, config)
        compared += 1
    assert compared >= 10
