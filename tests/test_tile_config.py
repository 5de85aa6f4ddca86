"""The tile configs: no two alike, and what a call says of one."""

import dataclasses

import numpy as np

from jax_fp8gemm import _tile_config


def test_configs_differ():
    assert len(set(_tile_config.CONFIGS)) == len(_tile_config.CONFIGS)


def test_attributes_are_int32_and_complete():
    config = _tile_config.CONFIGS[0]
    how = dict(is_1d1d=True, out_f32=True, accumulate=False, lhs_e5m2=False, rhs_e5m2=True)
    attributes = config.attributes(**how, num_sms=132)
    assert all(isinstance(value, np.int32) for value in attributes.values())
    assert attributes == dataclasses.asdict(config) | how | {"num_sms": 132, "grouping": 0}
    grouped = config.attributes(**how, num_sms=132, grouping=_tile_config.GROUPED_CONTRACTION)
    assert grouped == attributes | {"grouping": 2}
