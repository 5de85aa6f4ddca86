"""The choice of a tile config: legal and pure."""

from hypothesis import given
from hypothesis import strategies as st

from jax_fp8gemm._tuning import choose, tile_config

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
    assert config in tile_config.configs(is_1d1d=is_1d1d)
    # wgmma multiplies 64 rows at a time: no tile may have 64 rows that no row of lhs can fill.
    assert config.block_m < m + 64
    assert config == choose.choose(m, n, k, **how, num_sms=num_sms)


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
        assert config in tile_config.CONFIGS
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
