"""The tile configs: no two alike, and what a call says of one."""

import dataclasses

import numpy as np
import pytest

from jax_fp8gemm._tuning import gated_config, tile_config


@pytest.mark.parametrize("is_1d1d", (False, True))
def test_configs_differ(is_1d1d):
    dense = tile_config.configs(is_1d1d=is_1d1d, with_clusters=True)
    assert len(set(dense)) == len(dense)


def test_only_dense_1d2d_products_get_clusters_unless_asked_for():
    assert all(c.cluster_m * c.cluster_n == 1 for c in tile_config.configs(is_1d1d=True))
    assert any(c.cluster_m == 2 for c in tile_config.configs(is_1d1d=False))
    assert all(c.cluster_m * c.cluster_n == 2 for c in tile_config.CLUSTER_CONFIGS)
    clusters = set(tile_config.CLUSTER_CONFIGS)
    assert clusters < set(tile_config.configs(is_1d1d=True, with_clusters=True))
    assert clusters < set(tile_config.configs(is_1d1d=False, with_clusters=True))
    rows = tile_config.GROUPED_ROWS
    grouped = tile_config.configs(rows, is_1d1d=False, with_clusters=True)
    assert not clusters & set(grouped)


def test_attributes_are_int32_and_complete():
    config = tile_config.CONFIGS[0]
    how = dict(is_1d1d=True, out_f32=True, accumulate=False, lhs_e5m2=False, rhs_e5m2=True)
    attributes = config.attributes(**how, num_sms=132)
    assert all(isinstance(value, np.int32) for value in attributes.values())
    of_h = "gated", "h_e5m2", "h_pow2_scale", "activation", "limit", "alpha", "up_offset"
    defaults = {"grouping": 0, "transpose_out": 0} | dict.fromkeys(of_h, 0)
    assert attributes == dataclasses.asdict(config) | how | {"num_sms": 132} | defaults
    grouped = config.attributes(**how, num_sms=132, grouping=tile_config.GROUPED_CONTRACTION)
    assert grouped == attributes | {"grouping": 2}


def test_a_gated_product_says_what_its_h_is():
    how = dict(lhs_e5m2=False, rhs_e5m2=False, e5m2=True, pow2_scale=True, activation="relu2")
    attributes = gated_config.attributes(132, **how)
    assert all(isinstance(value, np.int32) for value in attributes.values())
    wanted = dict(gated=1, h_e5m2=1, h_pow2_scale=1, activation=3, limit=0, alpha=0, up_offset=0)
    wanted |= dict(block_m=128, block_n=256, num_stages=4, num_slabs=1, grouping=1)
    assert {name: attributes[name] for name in wanted} == wanted
