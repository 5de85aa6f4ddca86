"""What group_sizes means, against a plain loop over the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp8gemm._data import groups as _groups

INT32 = np.iinfo(np.int32)
# One program each, whatever the sizes.
extents = pytest.mark.parametrize("g, m", [(1, 300), (3, 1), (8, 300), (64, 1000), (1, 0), (5, 0)])


def group_sizes(g, m):
    """Even shares, block edges, all rows, and what no caller should pass."""
    size = (
        st.integers(0, 2 * m // g + 1)
        | st.sampled_from([0, 1, 127, 128, 129, m, m + 1, -1, INT32.max, INT32.min])
        | st.integers(INT32.min, INT32.max)
    )
    return st.just([0] * g) | st.lists(size, min_size=g, max_size=g)


def first_rows(m):
    return st.just(0) | st.integers(-2, m + 2) | st.sampled_from([INT32.max, INT32.min])


@functools.cache
def jitted(function, m):
    return jax.jit(functools.partial(function, m=m))


def call(function, sizes, first_row, m, dtype=np.int32):
    """The function of _groups with the sizes as operands, and its result in NumPy."""
    operands = jnp.asarray(np.asarray(sizes, dtype)), jnp.full((1,), first_row, jnp.int32)
    return jax.tree.map(np.asarray, jitted(function, m)(*operands))


def assert_equal(found, expected):
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


def expected_groups(sizes, first_row, m):
    groups = np.full(m, len(sizes))
    for i, (start, end) in enumerate(reference.row_ranges(sizes, m, first_row)):
        groups[start:end] = i
    return groups


def expected_rows(sizes, first_row, m):
    """Block after block: the rows of a group, then m up to the next multiple of 128."""
    rows = []
    for start, end in reference.row_ranges(sizes, m, first_row):
        rows += [*range(start, end), *[m] * (-(end - start) % 128)]
    extent = (m + 127 * len(sizes)) // 128 * 128
    assert len(rows) <= extent
    return rows + [m] * (extent - len(rows))


@extents
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_row_ranges(g, m, data):
    sizes, first_row = data.draw(group_sizes(g, m)), data.draw(first_rows(m))
    starts, ends = call(_groups.row_ranges, sizes, first_row, m)
    expected = np.asarray(reference.row_ranges(sizes, m, first_row))
    assert_equal(starts, expected[:, 0])
    assert_equal(ends, expected[:, 1])


@extents
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_group_of_rows(g, m, data):
    sizes, first_row = data.draw(group_sizes(g, m)), data.draw(first_rows(m))
    found = call(_groups.group_of_rows, sizes, first_row, m)
    assert_equal(found, expected_groups(sizes, first_row, m))


@extents
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_of_columns(g, m, data):
    sizes, first_row = data.draw(group_sizes(g, m)), data.draw(first_rows(m))
    found = call(_groups.rows_of_columns, sizes, first_row, m)
    assert_equal(found, expected_rows(sizes, first_row, m))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_int64_sizes_beyond_int32(data):
    g, m = 4, 300
    size = st.integers(0, m) | st.integers(-(2**63), 2**63 - 1) | st.just(2**32 + 5)
    sizes, first_row = data.draw(st.lists(size, min_size=g, max_size=g)), data.draw(first_rows(m))
    with jax.enable_x64(True):
        starts, ends = call(_groups.row_ranges, sizes, first_row, m, np.int64)
        groups = call(_groups.group_of_rows, sizes, first_row, m, np.int64)
        rows = call(_groups.rows_of_columns, sizes, first_row, m, np.int64)
    expected = np.asarray(reference.row_ranges(sizes, m, first_row))
    assert_equal(starts, expected[:, 0])
    assert_equal(ends, expected[:, 1])
    assert_equal(groups, expected_groups(sizes, first_row, m))
    assert_equal(rows, expected_rows(sizes, first_row, m))


@pytest.mark.parametrize("g", [2, 1024])
def test_sums_of_sizes_do_not_overflow(g):
    m = 2**30 - 1  # twice that is the largest int32
    sizes = np.full(g, INT32.max)
    starts, ends = call(_groups.row_ranges, sizes, 1, m)
    assert_equal(starts, [1] + [m] * (g - 1))
    assert_equal(ends, [m] * g)


@given(g=st.integers(1, 1024), more=st.integers(0, 1 << 20))
def test_ragged_extent_holds_the_worst_sizes_and_no_more(g, more):
    # Single rows waste most; the last group then has the rest.
    num_blocks = g - 1 + -(-(1 + more) // 128)
    assert _groups.ragged_extent(g + more, g) == 128 * num_blocks


@extents
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_groups_start_at_multiples_of_128_columns(g, m, data):
    sizes = data.draw(group_sizes(g, m))
    ranges = np.asarray(reference.row_ranges(sizes, m), np.int32)
    found = np.asarray(jax.jit(_groups.column_starts)(*jnp.asarray(ranges.T)))
    blocks = [-(-(end - start) // 128) for start, end in ranges]
    assert_equal(found, [128 * sum(blocks[:i]) for i in range(g)])


def struct(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
def test_accepted_group_sizes(dtype):
    _groups.check_group_sizes("op", np.zeros(1024, dtype))
    _groups.check_group_sizes("op", np.zeros(3, dtype), 3)


@pytest.mark.parametrize(
    "sizes, num_groups, error, message",
    [
        (struct(3, dtype=jnp.float32), None, TypeError, r"must be integers; got .* f32\[3\]"),
        (struct(3, dtype=jnp.bool_), None, TypeError, r"must be integers; got .* bool\[3\]"),
        (struct(3, 1), None, ValueError, r"must be \(g,\); got group_sizes s32\[3,1\]"),
        (struct(), None, ValueError, r"must be \(g,\); got group_sizes s32\[\]"),
        (
            struct(3),
            4,
            ValueError,
            r"must have one size for each of the 4 groups of rhs; got .* s32\[3\]",
        ),
        (struct(0), None, ValueError, r"must have 1 to 1024 groups; got group_sizes s32\[0\]"),
        (struct(1025), 1025, ValueError, r"must have 1 to 1024 groups; got .* s32\[1025\]"),
    ],
)
def test_bad_group_sizes_are_told(sizes, num_groups, error, message):
    with raises(error, match="op: group_sizes " + message):
        _groups.check_group_sizes("op", sizes, num_groups)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64]
)
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("lowest", [0, -1])
def test_as_int32_saturates(dtype, convert, lowest):
    info = np.iinfo(dtype)
    values = [int(info.min), 0, 5, 127, int(info.max)]
    with jax.enable_x64(True):
        found = _groups.as_int32(convert(np.array(values, dtype)), lowest)
    assert found.dtype == jnp.int32
    assert_equal(found, [min(max(value, lowest), INT32.max) for value in values])


def test_row_ranges_of_2_to_the_30_rows():
    _, ends = _groups.row_ranges(
        jnp.full((2,), 2**30, jnp.int32), jnp.zeros((1,), jnp.int32), 2**30
    )
    np.testing.assert_array_equal(ends, [2**30, 2**30])
