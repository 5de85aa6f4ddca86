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


# Weight gradients in bf16, us in 128x128, 192x128 and 256x96: an H200, 2026-11-23, operands random.
# Groups, m, n, and the contraction of all of them.
_TILES = ((128, 128), (192, 128), (256, 96))
_WGRAD_US = {
    (8, 7168, 4096, 32768): (1849.9, 1817.7, 1746.3),
    (8, 2048, 7168, 32768): (933.3, 896.8, 884.6),
    (16, 2048, 1536, 32768): (224.2, 203.2, 209.6),
    (16, 768, 2048, 32768): (122.4, 117.9, 115.0),
    (8, 4096, 28672, 16384): (3969.7, 3765.2, 3775.6),
    (32, 7168, 4096, 16384): (1320.0, 1181.6, 1364.6),
    (1, 2112, 7168, 4096): (133.9, 120.5, 138.7),
    (1, 7168, 2048, 4096): (119.1, 123.2, 117.9),
    (1, 4096, 7168, 4096): (231.0, 235.9, 223.6),
    (1, 7168, 16384, 4096): (910.8, 888.9, 843.2),
    (1, 4096, 4096, 16384): (509.6, 551.9, 499.2),
}


@pytest.mark.parametrize(("shape", "times"), _WGRAD_US.items(), ids=str)
def test_choice_is_the_fastest_that_was_measured_or_close(shape, times):
    groups, m, n, k = shape
    how = dict(is_1d1d=True, out_f32=False, accumulate=False)
    if groups == 1:
        config = _tile_choice.choose(m, n, k, **how)
    else:
        config = _tile_choice.choose_grouped(m, n, k, groups, **how)
    assert times[_TILES.index((config.block_m, config.block_n))] <= 1.04 * min(times), config
