"""Operands and assertions that the tests of all grouped ops share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import shapes
from assertions import assert_exact
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import ScaledArray

SQUARE = (128, 128)

patterns = pytest.mark.parametrize("m, sizes", shapes.GROUPS.values(), ids=shapes.GROUPS.keys())
# Three group_sizes to map over.
SIZES = np.array([(20, 0, 13), (0, 41, 3), (1, 2, 3)])


def int32(sizes):
    return jnp.asarray(np.asarray(sizes, np.int64).astype(np.int32))


# group_sizes that no op takes: arguments, error, message.
BAD_SIZES = [
    (dict(group_sizes=[1, 2, 3]), TypeError, "group_sizes must be an array; got list"),
    (dict(group_sizes=jnp.ones(3)), TypeError, r"group_sizes must be integers; .*f32\[3\]"),
    (
        dict(group_sizes=int32([[1, 2, 3]])),
        ValueError,
        r"group_sizes must be \(g,\); got group_sizes s32\[1,3\]",
    ),
]


def any_sizes(g, m):
    """Lists of g sizes, some of which no caller should pass."""
    size = st.integers(-1, m) | st.integers(-(2**31), 2**31 - 1)
    return st.lists(size, min_size=g, max_size=g)


@functools.cache
def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(1, 2, shape).astype(np.float32)


def integers(*shape, seed=0):
    """Exact in FP8; sums of 128 products of two are exact in f32."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def powers(*shape, seed=0):
    return (2.0 ** np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32)


def scaled(values, scale, block=(1, 128)):
    """ScaledArray of values that are exact in e4m3."""
    return ScaledArray(
        jnp.asarray(values).astype(jnp.float8_e4m3fn), jnp.asarray(scale), None, block
    )


def zeros(*shape, block=(1, 128)):
    return scaled(np.zeros(shape), jnp.zeros(reference.scale_shape(shape, block)), block)


def assert_maps(function, in_axes, elements, truth):
    """vmap of function over the batch of some operands, the others those of element 0."""
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *x) for x in zip(*elements)]  # noqa: B905
    batch = zip(in_axes, elements[0], stacked, strict=True)
    out = jax.vmap(function, in_axes)(*(x if d is None else xs for d, x, xs in batch))
    for i, element in enumerate(elements):
        mapped = zip(in_axes, elements[0], element, strict=True)
        assert_exact(out[i], truth(*(x if d is None else xi for d, x, xi in mapped)))


def on_two_devices(function):
    """function on the halves of all its operands, each on a device of its own."""
    # conftest makes four CPU devices: this skips only on a machine of one GPU.
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 devices")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
