"""Shardings by parts of a mesh axis, which XLA proposes where heads are fewer than devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_all_same_bits
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh

from jax_fp8gemm import Recipe, einsum, matmul
from jax_fp8gemm._sharding.proposed import read_proposals

# Products of small integers are exact with it.
EXACT = Recipe(pow2_scale=True)
TOKENS, HIDDEN = 128, 256
product = functools.partial(matmul, recipe=EXACT)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def rows_of_heads(heads, dim, x, w, wo):
    """Each head's rows by one matrix, as keys of latent attention."""
    return product(product(x, w).reshape(TOKENS, heads, dim), wo[:dim])


def all_heads(heads, dim, x, w, wo):
    """An output projection that contracts heads and their columns."""
    y = product(x, w).reshape(TOKENS, heads, dim)
    return einsum("thd,hde->te", y, wo.reshape(heads, dim, -1), recipe=EXACT)


def heads_in_batches(heads, dim, x, w, wo):
    y = product(x, w).reshape(TOKENS, heads, dim)
    return einsum("thd,hde->hte", y, wo.reshape(heads, dim, -1), recipe=EXACT)


@pytest.mark.parametrize("heads, dim", [(1, 256), (2, 128), (2, 64), (6, 128)])
@pytest.mark.parametrize("layer", [rows_of_heads, all_heads, heads_in_batches])
def test_fewer_heads_than_devices(layer, heads, dim):
    """The columns of w lie on four devices, as in tensor parallelism. The bits are those of one."""
    layer = functools.partial(layer, heads, dim)
    operands = integers(TOKENS, HIDDEN), integers(HIDDEN, heads * dim, seed=1)
    operands = *operands, integers(heads * dim, 128, seed=2)
    dout = integers(*jax.eval_shape(layer, *operands).shape, seed=3)

    @jax.jit
    def run(dout, *operands):
        out, pullback = jax.vjp(layer, *operands)
        return out, *pullback(dout)

    on = mesh(AxisType.Auto)
    specs = P(), P(), P(None, "x"), P()
    placed = [
        jax.device_put(x, NamedSharding(on, spec))
        for x, spec in zip((dout, *operands), specs, strict=True)
    ]
    assert_all_same_bits(run(*placed), run(dout, *operands))


def specs_read(on, *shardings, shape=(24, 24)):
    """The axes of the mesh that was read, and the specs of arrays with these shardings."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for s in shardings]
    found, specs = read_proposals(on, arrays)
    assert list(found.devices.flat) == list(on.devices.flat)
    return dict(found.shape), specs


def test_whole_axes_are_read_as_they_are():
    on = mesh(AxisType.Auto, AxisType.Auto, shape=(2, 4))
    specs = P("x", "y"), P(None, ("y", "x")), P(("x", "y")), P(), P("y")
    shape, found = specs_read(on, *(NamedSharding(on, spec) for spec in specs))
    assert shape == {"x": 2, "y": 4}
    assert found == [
        [("x",), ("y",)], [(), ("y", "x")], [("x", "y"), ()], [(), ()], [("y",), ()]
    ]  # fmt: skip


def test_a_part_of_an_axis_splits_the_axes():
    on = mesh(AxisType.Auto, AxisType.Auto, shape=(2, 4))
    finer = Mesh(on.devices.reshape(2, 2, 2), ("x", "a", "b"))
    specs = P("a", "x"), P("b"), P(None, ("x", "b", "a")), P(("a", "b"), "x")
    shape, found = specs_read(on, *(NamedSharding(finer, spec) for spec in specs))
    assert shape == {"x/0": 2, "y/0": 2, "y/1": 2}
    x, a, b = shape
    assert found == [[(a,), (x,)], [(b,), ()], [(), (x, b, a)], [(a, b), (x,)]]


def test_what_no_axes_describe_is_read_as_uncut():
    on = mesh(AxisType.Auto, shape=(6,))
    three = Mesh(on.devices.reshape(3, 2), ("a", "b"))  # 6 is 2 * 3 here, major first
    shape, found = specs_read(on, NamedSharding(three, P("a")), NamedSharding(on, P("x")))
    assert shape == {"x/0": 2, "x/1": 3}
    assert found == [[(), ()], [("x/0", "x/1"), ()]]


def test_no_sharding_is_read_as_uncut():
    on = mesh(AxisType.Auto)
    shape, found = specs_read(on, None, SingleDeviceSharding(jax.devices()[0]))
    assert (shape, found) == ({"x": 4}, [[(), ()], [(), ()]])
