"""Operands on a mesh: sharded by the compiler, explicitly, or by shard_map."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED
from errors import raises
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh
from test_primitive import K, M, N, cuda_text, custom_calls

from jax_fp8gemm import dot_general, matmul, quantize, ragged_dot, ragged_dot_general

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    # NumPy's: of arrays that lie on a device, JAX compiles a program to cut them.
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((M, K), (K, N)))


def loss(lhs, rhs):
    return (matmul(lhs, rhs) ** 2).sum()


def value_and_gradients(lhs, rhs, **kwargs):
    """(dlhs, drhs) of `loss`, and the product."""

    def loss_and_out(lhs, rhs):
        out = matmul(lhs, rhs, **kwargs)
        return (out**2).sum(), out

    return jax.jit(jax.grad(loss_and_out, (0, 1), has_aux=True))(lhs, rhs)


@functools.cache
def unsharded():
    gradients, out = value_and_gradients(*operands())
    return out, *gradients


def assert_equal(found, expected):
    assert reference.calc_diff(found, expected) < REORDERED


SPECS = {
    "m": (P("x"), P(), None),
    "k": (P(None, "x"), P("x"), P("x")),
    "n": (P(), P(None, "x"), None),
    "m and k": (P("x"), P("x"), None),
    "m and n": (P("x"), P(None, "x"), P("x")),
}


@pytest.mark.parametrize("lhs_spec, rhs_spec, out_spec", SPECS.values(), ids=SPECS.keys())
def test_explicitly_sharded_operands_give_the_unsharded_result(lhs_spec, rhs_spec, out_spec):
    """Of Auto axes, and of bits: test_partition.py."""
    on = mesh(EXPLICIT)
    specs = zip(operands(), (lhs_spec, rhs_spec), strict=True)
    lhs, rhs = (jax.device_put(x, NamedSharding(on, spec)) for x, spec in specs)
    kwargs = {} if out_spec is None else dict(out_sharding=NamedSharding(on, out_spec))
    gradients, out = value_and_gradients(lhs, rhs, **kwargs)
    expected_out, *expected_gradients = unsharded()
    assert_equal(out, expected_out)
    for x, expected, operand in zip(gradients, expected_gradients, (lhs, rhs), strict=True):
        assert_equal(x, expected)
        assert jax.typeof(x).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.parametrize("lhs_spec", [P(None, "x"), P(("x", "y"))])
def test_eager_calls_on_explicit_arrays(lhs_spec):
    on = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(on, lhs_spec))
    with jax.set_mesh(on):
        assert_equal(matmul(lhs, rhs, out_sharding=P()), unsharded()[0])
    for kwargs in (dict(), dict(axis=-2), dict(block=(128, 128), with_transpose=True)):
        sharded, plain = (quantize(x, **kwargs) for x in (lhs, operands()[0]))
        jax.tree.map(reference.assert_same_bits, sharded, plain)
        assert_equal(sharded.dequantize(), plain.dequantize())


def test_result_is_sharded_as_that_of_jnp_matmul():
    on = mesh(EXPLICIT, EXPLICIT, shape=(2, 2))
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(on, P("x")))
    rhs = jax.device_put(rhs, NamedSharding(on, P(None, "y")))
    out = matmul(lhs, rhs)
    assert out.sharding == jnp.matmul(lhs, rhs).sharding
    assert_equal(out, unsharded()[0])
    assert dot_general(lhs, rhs, DIMS).sharding == out.sharding


def test_sharded_k_needs_an_out_sharding_as_in_lax():
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(mesh(EXPLICIT), P(None, "x")))
    rhs = jax.device_put(rhs, NamedSharding(mesh(EXPLICIT), P("x")))
    with pytest.raises(Exception, match="out_sharding"):
        matmul(lhs, rhs)


DIMS = (((1,), (0,)), ((), ()))
RAGGED_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
PRODUCTS = {
    "matmul": matmul,
    "dot_general": lambda lhs, rhs, **kwargs: dot_general(lhs, rhs, DIMS, **kwargs),
    "ragged_dot": lambda lhs, rhs, **kwargs: ragged_dot(
        lhs, rhs[None], jnp.array([M], jnp.int32), **kwargs
    ),
    "ragged_dot_general": lambda lhs, rhs, **kwargs: ragged_dot_general(
        rhs, rhs, jnp.array([K], jnp.int32), RAGGED_ROWS, **kwargs
    ),
}
AXIS_TYPES = {"auto": (AUTO,), "explicit": (EXPLICIT,), "both": (EXPLICIT, AUTO)}


@functools.cache
def mesh_of(name):
    axis_types = AXIS_TYPES[name]
    return mesh(*axis_types, shape=(4,) if len(axis_types) == 1 else (2, 2))


def named(name, spec):
    """What makes the sharding: there may be too few devices for it."""
    return lambda: NamedSharding(mesh_of(name), spec)


BAD_OUT_SHARDINGS = [
    (None, P(), ValueError, "a NamedSharding where there is no mesh of jax.set_mesh; got P"),
    (None, P("x"), ValueError, "a NamedSharding where there is no mesh of jax.set_mesh; got P"),
    (None, "x", TypeError, "a PartitionSpec or a NamedSharding; got 'x'"),
    (None, named("auto", P("x")), ValueError, "name Explicit axes .*with_sharding_c"),
    (None, named("explicit", P("x")), ValueError, r"name Explicit axes .*, axes \(\)"),
    ("auto", P("x"), ValueError, "name Explicit axes .*with_sharding_constraint"),
    ("auto", named("auto", P("x")), ValueError, "name Explicit axes"),
    ("explicit", P("z"), ValueError, r"name Explicit axes of .*; got P\('z',\), axes \('x',\)"),
    ("explicit", P("x", "x"), ValueError, r"each once; got P\('x', 'x'\), axes \('x',\)"),
    ("explicit", named("auto", P()), ValueError, "be over the operands' mesh; got"),
    ("both", P("y"), ValueError, r"name Explicit axes of .*; got P\('y',\), axes \('x',\)"),
    ("both", P(P.UNCONSTRAINED), ValueError, "name Explicit axes"),
]


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("on, out_sharding, error, message", BAD_OUT_SHARDINGS)
def test_no_out_sharding_is_ignored(op, on, out_sharding, error, message):
    if callable(out_sharding):
        out_sharding = out_sharding()
    function = lambda *args: PRODUCTS[op](*args, out_sharding=out_sharding)
    with jax.set_mesh(mesh_of(on)) if on else contextlib.nullcontext():
        with raises(error, match=f"{op}: out_sharding must .*{message}"):
            jax.eval_shape(function, *operands())


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("on, spec", [("auto", P()), ("explicit", P(None, "x")), ("both", P("x"))])
@pytest.mark.parametrize("has_mesh", [False, True])
def test_out_sharding_is_kept(op, on, spec, has_mesh):
    spec = P(None, *spec) if op == "ragged_dot_general" else spec
    with jax.set_mesh(mesh_of(on)):
        out_sharding = NamedSharding(mesh_of(on), spec) if has_mesh else spec
        function = lambda *args: PRODUCTS[op](*args, out_sharding=out_sharding)
        out = jax.make_jaxpr(function)(*operands()).out_avals[0]
    assert out.sharding.spec == P(*spec, *(None,) * (out.ndim - len(spec)))


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_a_sharded_batch(in_axes):
    lhs, rhs = operands()
    on = mesh(EXPLICIT)
    place = lambda x: jax.device_put(jnp.stack([x] * 4), NamedSharding(on, P("x")))
    args = [x if d is None else place(x) for x, d in zip((lhs, rhs), in_axes, strict=True)]
    out = np.asarray(jax.jit(jax.vmap(matmul, in_axes))(*args))
    for element in out:
        assert_equal(element, unsharded()[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_inside_shard_map(axis_type, check_vma):
    lhs, rhs = operands()
    sharded = jax.shard_map(
        matmul,
        mesh=mesh(axis_type),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    lhs = jax.device_put(lhs, NamedSharding(mesh(axis_type), P("x")))
    rhs = jax.device_put(rhs, NamedSharding(mesh(axis_type), P()))
    assert_equal(jax.jit(sharded)(lhs, rhs), unsharded()[0])


def test_cotangents_of_an_unvarying_rhs_are_summed():
    lhs, rhs = operands()
    rows = 2 * 128  # of lhs in each shard: whole scale blocks, so sharding moves no rounding
    on = mesh(AUTO, shape=(4,))
    lhs = jnp.concatenate([lhs] * (4 * rows // M))
    gradients = jax.shard_map(
        lambda l, r: jax.grad(loss, (0, 1))(l, r),
        mesh=on,
        in_specs=(P("x"), P()),
        out_specs=(P("x"), P()),
    )
    expected = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    for x, y in zip(jax.jit(gradients)(lhs, rhs), expected, strict=True):
        assert_equal(x, y)


def test_a_forgotten_psum_is_caught():
    contract = jax.shard_map(
        matmul, mesh=mesh(AUTO), in_specs=(P(None, "x"), P("x")), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        contract(*operands())


def test_sharded_k_with_a_psum_inside_shard_map():
    contract = jax.shard_map(
        lambda l, r: jax.lax.psum(matmul(l, r), "x"),
        mesh=mesh(AUTO),
        in_specs=(P(None, "x"), P("x")),
        out_specs=P(),
    )
    assert_equal(jax.jit(contract)(*operands()), unsharded()[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_partial_manual_shard_map(axis_type, check_vma):
    on = mesh(axis_type, axis_type, shape=(2, 2))
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(on, P("x")))
    rhs = jax.device_put(rhs, NamedSharding(on, P(None, "y")))
    rows = jax.shard_map(
        matmul,
        mesh=on,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
        check_vma=check_vma,
    )
    assert_equal(jax.jit(rows)(lhs, rhs), unsharded()[0])


@pytest.mark.parametrize("k, fits", [(8 * 64, False), (8 * 128, True)])
def test_scales_of_shards_fit_the_whole_where_these_are_whole_blocks(k, fits):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, k)), jnp.float32)
    on = mesh(AUTO, shape=(8,))
    rows = jax.shard_map(quantize, mesh=on, in_specs=P(None, "x"), out_specs=P(None, "x"))
    found = rows(x)
    if fits:
        jax.tree.map(reference.assert_same_bits, found, quantize(x))
        return
    message = r"must be f32\[16,4\] .*; got f32\[16,8\]. If the shards .* at multiples of 128"
    with pytest.raises(ValueError, match=message):
        found.dequantize()


def test_shard_map_lowers_to_the_kernels():
    lhs, rhs = operands()
    rows = jax.shard_map(matmul, mesh=mesh(AUTO), in_specs=(P("x"), P()), out_specs=P("x"))
    calls = custom_calls(cuda_text(rows, lhs, rhs))
    assert len(calls) == 3
    assert f"tensor<{M // 4}x{K}xf8E4M3FN>" in calls[2][2]


def test_shard_map_lowers_without_devices():
    on = AbstractMesh((4,), ("x",), axis_types=(AUTO,))
    rows = jax.shard_map(matmul, mesh=on, in_specs=(P("x"), P()), out_specs=P("x"))
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec))
        for x, spec in zip(operands(), (P("x"), P()), strict=True)
    ]
    assert len(custom_calls(cuda_text(rows, *structs))) == 3
