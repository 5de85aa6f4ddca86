"""The predicted time of a product: in step with what was measured."""

import json
import math
import pathlib

import pytest

from benchmarks.tiles import parse_tile, tile_text
from jax_fp8gemm._tuning import choose, dense_cost

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


# The model may be off by this much; its purpose is to rank configs. Where bytes or launches decide
# (small m), times are a few microseconds and the ramps at both ends a large part of them.
@pytest.mark.parametrize(("smallest_m", "tolerance"), [(1024, 0.25), (8, 0.35)])
def test_model_predicts_the_measured_times(smallest_m, tolerance):
    rows = json.loads((RESULTS / "nvidia_h200" / "dense.json").read_text())["rows"]
    rows = [row for row in rows if row["m"] >= smallest_m]
    assert len(rows) >= 10
    for row in rows:
        shape, config = (row["m"], row["n"], row["k"]), parse_tile(row["config"])
        predicted = dense_cost.dense_time_us(config, *shape, 2, 132)
        assert predicted == pytest.approx(row["us"], rel=tolerance), (shape, config)


def test_choice_loses_little_on_shapes_drawn_at_random():
    """The time of the chosen config over that of the fastest of all that were timed."""
    path = RESULTS / "nvidia_h200" / "tile_times.json"
    rows = json.loads(path.read_text())["rows"]
    regrets = []
    for row in rows:
        how = dict(is_1d1d=False, out_f32=False, accumulate=False)
        chosen = row["us"].get(tile_text(choose.choose(row["m"], row["n"], row["k"], **how)))
        if chosen is not None:  # the file may be older than a config
            regrets.append(chosen / min(row["us"].values()))
    assert len(regrets) > 100
    # 1.022, in a file with ten tiles more than the one before, which had 1.018. Some constants were
    # fitted to these shapes, the others to others. A choice by chance gives 1.42.
    assert math.prod(regrets) ** (1 / len(regrets)) < 1.025
    assert sorted(regrets)[-5] < 1.15


def test_choice_loses_little_on_groups_drawn_at_random():
    """The same of groups of rows. The first 96 are drawn, and no constant was fitted to them."""
    path = RESULTS / "nvidia_h200" / "grouped_tile_times.json"
    rows, how = json.loads(path.read_text())["rows"], dict(is_1d1d=False, accumulate=False)
    regrets = []
    for row in rows:
        shape = row["rows"], row["n"], row["k"], row["groups"]
        chosen = row["us"][tile_text(choose.choose(*shape, **how, out_f32=False))]
        regrets.append(chosen / min(row["us"].values()))
    drawn, named = regrets[:96], regrets[96:]
    assert len(named) > 40
    mean = lambda ratios: math.prod(ratios) ** (1 / len(ratios))
    # 1.030 and 1.009. A choice by chance gives 1.28 and 1.38.
    assert mean(drawn) < 1.035 and sorted(drawn)[-5] < 1.15
    assert mean(named) < 1.015 and max(named) < 1.12


@pytest.mark.parametrize("device", ["nvidia_h200", "nvidia_h100_80gb_hbm3"])
def test_choice_loses_little_on_held_out_rows(device):
    """The time of the chosen config over that of the fastest, where no constant was fitted."""
    rows = json.loads((RESULTS / device / "dense_held_out_regret.json").read_text())["rows"]
    regrets = []
    for row in rows:
        how = dict(is_1d1d=False, out_f32=False, accumulate=False)
        us, shape = row["peers"], (row["m"], row["n"], row["k"])
        chosen = us.get(tile_text(choose.choose(*shape, **how)))
        if chosen is not None:  # the file may be older than a config
            regrets.append(chosen / min(us.values()))
    # The file of the H100 (81f29e7) is older than many tiles.
    assert len(regrets) >= (20 if device == "nvidia_h200" else 13)
    # Means of 1.017 (1b0cb83) and 1.006. The goal for the worst is 1.12. The H200 has 1.11, for
    # 333x1408x4304. The fastest tile there has 64 rows and a slab. Older files have no such tile.
    assert math.prod(regrets) ** (1 / len(regrets)) < 1.02
    assert max(regrets) < 1.12


# Weight gradients in bf16, us in 128x128, 192x128 and 256x96: an H200, 2026-11-23, operands random.
# Groups, m, n, and the contraction of all of them in tokens.
_TILES = ((128, 128), (192, 128), (256, 96))
_WGRAD_US = {
    (8, 7168, 4096, 32768): (1915.3, 1885.2, 1787.3),
    (8, 2048, 7168, 32768): (964.4, 923.1, 902.4),
    (16, 2048, 1536, 32768): (229.3, 207.3, 209.2),
    (16, 768, 2048, 32768): (124.0, 119.1, 114.0),
    (8, 4096, 28672, 16384): (4094.7, 3877.6, 3838.8),
    (32, 7168, 4096, 16384): (1358.6, 1221.9, 1282.4),
    (1, 2112, 7168, 4096): (134.5, 122.1, 135.4),
    (1, 7168, 2048, 4096): (120.8, 125.9, 118.3),
    (1, 4096, 7168, 4096): (239.9, 240.5, 224.8),
    (1, 7168, 16384, 4096): (951.0, 920.0, 856.9),
    (1, 4096, 4096, 16384): (525.2, 561.4, 510.7),
}


@pytest.mark.parametrize(("shape", "times"), _WGRAD_US.items(), ids=str)
def test_choice_is_the_fastest_that_was_measured_or_close(shape, times):
    groups, m, n, k = shape
    how = dict(is_1d1d=True, out_f32=False, accumulate=False)
    if groups == 1:
        config = choose.choose(m, n, k, **how)
    else:
        columns = (k + 127 * groups) // 128 * 128  # each group in whole scale blocks
        config = choose.choose(m, n, columns, groups, **how)
    assert times[_TILES.index((config.block_m, config.block_n))] <= 1.04 * min(times), config


def test_choice_loses_little_on_held_out_groups_of_rows():
    rows = json.loads((RESULTS / "nvidia_h200" / "ragged_held_out_regret.json").read_text())["rows"]
    regrets = []
    for row in rows:
        how = dict(is_1d1d=False, out_f32=False, accumulate=False)
        chosen = choose.choose(row["rows"], row["n"], row["k"], row["groups"], **how)
        us = row["peers"].get(tile_text(chosen))
        if us is not None:  # the file may be older than a config
            regrets.append(us / min(row["peers"].values()))
    assert len(regrets) >= 20
    # 1.004 on the file of 72c476f. A choice by chance gives 1.39.
    assert math.prod(regrets) ** (1 / len(regrets)) < 1.01
    assert max(regrets) < 1.06
