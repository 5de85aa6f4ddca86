"""The choice of a tile config: legal and pure."""

import jax.export
import pytest
from errors import without_annotation_checks
from hypothesis import given
from hypothesis import strategies as st

from jax_fp8gemm._tuning import choose, partial_sums, split_k, tile_config

DENSE = dict(is_1d1d=False, out_f32=False, accumulate=False)
WGRAD = dict(is_1d1d=True, out_f32=True, accumulate=False)


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
    config = choose.choose(m, n, k, **how, num_sms=num_sms)
    split = () if is_1d1d else split_k.SPLIT_K_CONFIGS
    assert config in (*tile_config.configs(is_1d1d=is_1d1d), *split)
    # wgmma multiplies 64 rows at a time: no tile may have 64 rows that no row of lhs can fill.
    assert config.block_m < m + 64
    assert config == choose.choose(m, n, k, **how, num_sms=num_sms)


def test_few_rows_and_columns_of_a_long_contraction_are_split():
    """Measured on an H200: less than 0.7 of the time of other tiles."""
    for m, n, k in ((8, 528, 14336), (13, 528, 14288), (4, 256, 7168), (1, 128, 16384)):
        assert choose.choose(m, n, k, **DENSE).cluster_k == 8
    assert choose.choose(1, 1024, 8192, **DENSE).cluster_k == 4


@pytest.mark.parametrize(
    "shape, how",
    [
        ((8, 528, split_k.SPLIT_K_MOST_K + 1), DENSE),  # its partial sums have no room
        ((8, 528, 2032), DENSE),  # the launch of a cluster takes longer
        ((17, 528, 14336), DENSE),
        ((8, 7168, 16384), DENSE),  # every multiprocessor has a tile
        ((8, 528, 14336), dict(is_1d1d=True, out_f32=False, accumulate=False)),
        ((8, 528, 14336), dict(is_1d1d=False, out_f32=True, accumulate=True)),
        ((8, 528, 14336), DENSE | dict(transpose_out=True)),
        ((8, 528, 14336), DENSE | dict(num_sms=3)),
    ],
    ids=str,
)
def test_others_are_not_split(shape, how):
    assert choose.choose(*shape, **how).cluster_k == 1


@pytest.mark.parametrize("m, n, k", [(69, 1776, 10672), (157, 2560, 10864), (231, 3328, 13488)])
def test_rows_that_split_sectors_are_shared_by_four(m, n, k):
    """Measured on an H200: 0.78 to 0.85 of the time of what was chosen without such clusters."""
    assert choose.choose(m, n, k, **DENSE).cluster_n == 4


@pytest.mark.parametrize("m, n, k", [(69, 1776, 10624), (231, 3328, 13440)])
def test_whole_rows_of_lines_are_not_shared(m, n, k):
    assert choose.choose(m, n, k, **DENSE).cluster_n == 1


@pytest.mark.parametrize("m, n, k", [(20, 3248, 4560), (53, 9712, 1008)])
def test_few_rows_are_shared_by_four(m, n, k):
    """Measured on an H200: 0.91 and 0.93 of the time of what was chosen before."""
    assert choose.choose(m, n, k, **DENSE).cluster_n == 4


@pytest.mark.parametrize(
    "m, rows", [(1, 8), (8, 8), (9, 16), (17, 32), (33, 48), (49, 64), (64, 64)]
)
def test_a_product_in_parts_gets_a_tile_of_its_rows(m, rows):
    config = choose.choose(m, 576, 7168, **DENSE, num_parts=8)
    assert (config.block_m, config.cluster_k, config.partial_sums) == (rows, 8, True)
    assert config in partial_sums.PARTIAL_SUMS_CONFIGS


def test_a_program_that_leaves_k_open_is_not_split():
    (k,) = jax.export.symbolic_shape("k")
    with without_annotation_checks():  # an extent is annotated as an int
        assert choose.choose(8, 528, k, **DENSE).cluster_k == 1


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 18),
    k=st.integers(1, 1 << 17),
    num_groups=st.integers(1, 1024),
    is_1d1d=st.booleans(),
    out_f32=st.booleans(),
)
def test_every_grouped_shape_gets_a_config_of_its_family(m, n, k, num_groups, is_1d1d, out_f32):
    grouping = tile_config.GROUPED_CONTRACTION if is_1d1d else tile_config.GROUPED_ROWS
    how = dict(is_1d1d=is_1d1d, out_f32=out_f32, accumulate=False)
    config = choose.choose(m, n, k, num_groups, **how)
    assert config in tile_config.configs(grouping, is_1d1d=is_1d1d)


def test_overrides_name_configs():
    for (m, n, k, is_1d1d), config in choose._OVERRIDES.items():
        assert config in tile_config.configs(is_1d1d=is_1d1d)
        assert choose.choose(m, n, k, **(WGRAD if is_1d1d else DENSE)) == config


def test_overrides_are_for_the_card_they_were_measured_on():
    (m, n, k, _), config = next(iter(choose._OVERRIDES.items()))
    assert choose.choose(m, n, k, **DENSE, num_sms=114) != config


def test_override_holds_within_its_context_and_nests():
    first, second = tile_config.CONFIGS[:2]
    chosen = choose.choose(4096, 4096, 7168, **DENSE)
    with choose.override(first):
        with choose.override(second):
            assert choose.choose(4096, 4096, 7168, **DENSE) == second
        assert choose.choose(4096, 4096, 7168, **DENSE) == first
    assert choose.choose(4096, 4096, 7168, **DENSE) == chosen
