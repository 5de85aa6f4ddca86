"""The choice of a tile config: legal, pure, and in step with what was measured."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_fp8gemm import _tile_config

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia_h200"
DENSE = dict(is_1d1d=False, out_f32=False, accumulate=False)
WGRAD = dict(is_1d1d=True, out_f32=True, accumulate=False)


def _measured(family):
    return json.loads((RESULTS / f"{family}.json").read_text())["rows"]


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 18),
    k=st.integers(1, 1 << 17),
    is_1d1d=st.booleans(),
    out_f32=st.booleans(),
    num_sms=st.integers(4, 144),
)
def test_every_shape_gets_a_config_that_wastes_no_rows(m, n, k, is_1d1d, out_f32, num_sms):
    how = dict(is_1d1d=is_1d1d, out_f32=out_f32, accumulate=False)
    config = _tile_config.choose(m, n, k, **how, num_sms=num_sms)
    assert config in _tile_config.configs(is_1d1d=is_1d1d, out_f32=out_f32)
    # wgmma multiplies 64 rows at a time: no tile may have 64 rows that no row of lhs can fill.
    assert config.block_m <= 16 or config.block_m < m + 64
    assert config == _tile_config.choose(m, n, k, **how, num_sms=num_sms)


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 18),
    k=st.integers(1, 1 << 17),
    num_groups=st.integers(1, 1024),
    is_1d1d=st.booleans(),
    out_f32=st.booleans(),
)
def test_every_grouped_shape_gets_a_config_of_its_family(m, n, k, num_groups, is_1d1d, out_f32):
    grouping = _tile_config.GROUPED_CONTRACTION if is_1d1d else _tile_config.GROUPED_ROWS
    how = dict(is_1d1d=is_1d1d, out_f32=out_f32)
    config = _tile_config.choose_grouped(m, n, k, num_groups, **how, accumulate=False)
    assert config in _tile_config.configs(grouping, **how)


def test_configs_differ_and_overrides_name_them():
    assert len(set(_tile_config.CONFIGS)) == len(_tile_config.CONFIGS)
    for (m, n, k, is_1d1d), config in _tile_config._OVERRIDES.items():
        assert config in _tile_config.CONFIGS
        assert _tile_config.choose(m, n, k, **(WGRAD if is_1d1d else DENSE)) == config


def test_overrides_are_for_the_card_they_were_measured_on():
    (m, n, k, _), config = next(iter(_tile_config._OVERRIDES.items()))
    assert _tile_config.choose(m, n, k, **DENSE, num_sms=114) != config


def test_override_holds_within_its_context_and_nests():
    first, second = _tile_config.CONFIGS[:2]
    chosen = _tile_config.choose(4096, 4096, 7168, **DENSE)
    with _tile_config.override(first):
        with _tile_config.override(second):
            assert _tile_config.choose(4096, 4096, 7168, **DENSE) == second
        assert _tile_config.choose(4096, 4096, 7168, **DENSE) == first
    assert _tile_config.choose(4096, 4096, 7168, **DENSE) == chosen


def test_attributes_are_int32_and_complete():
    config = _tile_config.CONFIGS[0]
    how = dict(is_1d1d=True, out_f32=True, accumulate=False, lhs_e5m2=False, rhs_e5m2=True)
    attributes = config.attributes(**how, num_sms=132)
    assert all(isinstance(value, np.int32) for value in attributes.values())
    assert attributes == dataclasses.asdict(config) | how | {"num_sms": 132, "grouping": 0}
    grouped = config.attributes(**how, num_sms=132, grouping=_tile_config.GROUPED_CONTRACTION)
    assert grouped == attributes | {"grouping": 2}


# The model may be off by this much; its purpose is to rank configs. Where bytes or launches decide
# (small m), times are a few microseconds and the ramps at both ends a large part of them.
@pytest.mark.parametrize(("smallest_m", "tolerance"), [(1024, 0.25), (8, 0.35)])
def test_model_predicts_the_measured_times(smallest_m, tolerance):
    compared = 0
    for row in _measured("dense"):
        shape = row["m"], row["n"], row["k"]
        config = _tile_config.choose(*shape, **DENSE)
        if row["m"] < smallest_m or not row["config"].startswith(
            f"{config.block_m}x{config.block_n}/"
        ):
            continue
        predicted = _tile_config._time_us(config, *shape, False, 2, 132)
        assert predicted == pytest.approx(row["us"], rel=tolerance), (shape, config)
        compared += 1
    assert compared >= 10
