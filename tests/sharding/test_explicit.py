"""Every op over Explicit mesh axes, under every transformation, with every kind of sharding.

Operands are small integers and scales are powers of two, so FP8 loses nothing and results are equal
to those of jnp on one device. Shardings are those that jnp.matmul gives.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

from jax_fp8gemm import (
    Recipe,
    dot_general,
    einsum,
    matmul,
    quantize,
    quantize_weight,
    ragged_dot,
    ragged_dot_general,
)
from jax_fp8gemm._sharding.explicit_axes import reshape, reshaped_spec

EXACT = Recipe(pow2_scale=True)
M, K, N, FIRST = 8, 8, 16, 3  # FIRST: rows, or columns of lhs, in the first of two groups
DIMS = (((1,), (0,)), ((), ()))
CONTRACTION = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def group_sizes(total):
    return jnp.array([FIRST, total - FIRST], jnp.int32)


# name: (the op of (lhs, rhs), the same in jnp on one device, dimensions in front of rhs and out)
OPS = {
    "matmul": (partial(matmul, recipe=EXACT), jnp.matmul, 0, 0),
    "dot_general": (
        lambda lhs, rhs, **how: dot_general(lhs, rhs, DIMS, recipe=EXACT, **how),
        jnp.matmul,
        0,
        0,
    ),
    "einsum": (
        lambda lhs, rhs, out_sharding=None: jnp.einsum(
            "mk,kn->mn",
            lhs,
            rhs,
            out_sharding=out_sharding,
            _dot_general=partial(dot_general, recipe=EXACT),
        ),
        jnp.matmul,
        0,
        0,
    ),
    "ragged_dot": (
        lambda lhs, rhs, **how: ragged_dot(lhs, rhs, group_sizes(M), recipe=EXACT, **how),
        lambda lhs, rhs: jnp.where(jnp.arange(M)[:, None] < FIRST, lhs @ rhs[0], lhs @ rhs[1]),
        1,
        0,
    ),
    "ragged_dot in bf16": (
        lambda lhs, rhs, **how: ragged_dot(lhs, rhs, group_sizes(M), "highest", **how),
        lambda lhs, rhs: jnp.where(jnp.arange(M)[:, None] < FIRST, lhs @ rhs[0], lhs @ rhs[1]),
        1,
        0,
    ),
    "ragged_dot_general": (
        lambda lhs, rhs, **how: ragged_dot_general(
            lhs.T, rhs, group_sizes(K), CONTRACTION, recipe=EXACT, **how
        ),
        lambda lhs, rhs: jnp.stack([lhs[:, :FIRST] @ rhs[:FIRST], lhs[:, FIRST:] @ rhs[FIRST:]]),
        0,
        1,
    ),
}

# name: (specs of lhs and rhs, out_sharding, spec of the result)
CASES = {
    "replicated": (P(), P(), None, P(None, None)),
    "rows": (P("x"), P(), None, P("x", None)),
    "columns": (P(), P(None, "x"), None, P(None, "x")),
    "k": (P(None, "x"), P("x"), P(), P(None, None)),
    "reduced rhs": (P("x"), P(reduced={"x"}), None, P("x", None)),
    "reduced lhs": (P(reduced={"x"}), P(None, "x"), None, P(None, "x")),
    "unreduced result": (P(None, "x"), P("x"), P(unreduced={"x"}), P(None, None)),
}


def behind(spec, num_dims):
    """`spec` for an array with so many more dimensions in front, which nothing cuts."""
    if spec is None or not spec.partitions:
        return spec
    front = (None,) * num_dims
    return P(*front, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def forward(f, lhs, rhs, weights):
    return f(lhs, rhs)


def gradients(f, lhs, rhs, weights):
    return jax.grad(lambda lhs, rhs: (f(lhs, rhs) * weights).sum(), (0, 1))(lhs, rhs)


def over_batch(f, lhs, rhs, weights):
    return jax.vmap(f, (0, None))(lhs, rhs)


def gradients_of_scan(f, lhs, rhs, weights):
    def loss(lhs, rhs):
        step = lambda total, r: (total + (f(lhs, r) * weights).sum(), None)
        return jax.lax.scan(step, jnp.zeros(()), rhs)[0]

    return jax.grad(loss, (0, 1))(lhs, rhs)


def gradients_of_scan_over_batch(f, lhs, rhs, weights):
    return jax.vmap(lambda lhs: gradients_of_scan(f, lhs, rhs, weights))(lhs)


IS_MAPPED = (over_batch, gradients_of_scan_over_batch)
HAS_SCAN = (gradients_of_scan, gradients_of_scan_over_batch)

# name: (what is computed, whether it is jitted as a whole, whether the op is)
TRANSFORMATIONS = {
    "eager": (forward, False, False),
    "jit": (forward, True, False),
    "jit of grad": (gradients, True, False),
    "eager grad of jit": (gradients, False, True),
    "vmap": (over_batch, True, False),
    "grad of scan": (gradients_of_scan, True, False),
    "eager grad of scan": (gradients_of_scan, False, False),
    "vmap of grad of scan": (gradients_of_scan_over_batch, True, False),
}
# Other ways into ops that have all of them.
ONLY_SOME = {
    "einsum": ("jit of grad", "eager grad of jit"),
    "ragged_dot in bf16": ("eager grad of jit", "eager grad of scan", "vmap of grad of scan"),
}


def combinations():
    for op, transformation, case in itertools.product(OPS, TRANSFORMATIONS, CASES):
        if transformation not in ONLY_SOME.get(op, TRANSFORMATIONS):
            continue
        # JAX maps no reduced array: jax.vmap itself raises.
        if case == "reduced lhs" and TRANSFORMATIONS[transformation][0] in IS_MAPPED:
            continue
        yield op, transformation, case


@pytest.mark.parametrize("op, transformation, case", list(combinations()))
def test_values_and_shardings(op, transformation, case):
    f, plain, rhs_front, out_front = OPS[op]
    lhs_spec, rhs_spec, out_sharding, out_spec = CASES[case]
    run, is_jitted, op_is_jitted = TRANSFORMATIONS[transformation]
    lhs_dims = (2,) * (run in IS_MAPPED)
    rhs_dims = (2,) * (rhs_front + (run in HAS_SCAN))
    lhs_spec, rhs_spec = behind(lhs_spec, len(lhs_dims)), behind(rhs_spec, len(rhs_dims))
    out_sharding, out_spec = behind(out_sharding, out_front), behind(out_spec, out_front)
    lhs, rhs = integers(1, *lhs_dims, M, K), integers(2, *rhs_dims, K, N)
    weights = integers(3, *(2,) * out_front, M, N)
    expected = run(plain, *map(jnp.asarray, (lhs, rhs, weights)))

    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        f = f if out_sharding is None else partial(f, out_sharding=out_sharding)
        f = jax.jit(f) if op_is_jitted else f
        # Parts of a sum can be multiplied by nothing: they are added up.
        whole = (lambda l, r: reshard(f(l, r), out_spec)) if case == "unreduced result" else f
        operands = jax.device_put(lhs, lhs_spec), jax.device_put(rhs, rhs_spec)
        weights = jax.device_put(weights, out_spec)
        call = partial(run, whole)
        found = (jax.jit(call) if is_jitted else call)(*operands, weights)
        assert_types(run, found, operands, out_spec)
        found = jax.tree.map(lambda x: np.asarray(reshard(x, P())), found)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, expected))


def assert_types(run, found, operands, out_spec):
    """A gradient has its operand's sharding, unreduced for reduced; a result that of out_spec."""
    spec_of = lambda x: jax.typeof(x).sharding.spec
    if run in (forward, over_batch):
        assert spec_of(found) == behind(out_spec, run is over_batch)
        return
    dlhs, drhs = found
    lhs, rhs = operands
    assert spec_of(dlhs) == cotangent(spec_of(lhs))
    assert spec_of(drhs) == behind(cotangent(spec_of(rhs)), run is gradients_of_scan_over_batch)


def cotangent(spec):
    return P(*spec.partitions, unreduced=spec.reduced)


# Shapes and specs of lhs and rhs, and how the result is to be cut, by axes that cut operands too.
BATCHES = [
    ((M, K), P(), (4, K, N), P("x"), P(None, None, "x")),
    ((4, M, K), P(), (4, K, N), P(None, None, "x"), P("x")),
    ((4, M, K), P(None, "x"), (4, K, N), P(), P("x")),
    ((4, M, K), P(None, None, "x"), (4, K, N), P(None, "x"), P("x")),
    ((4, M, K), P("x"), (4, K, N), P("x"), P(None, "x")),
]


@pytest.mark.parametrize("lhs_shape, lhs_spec, rhs_shape, rhs_spec, out_spec", BATCHES)
def test_batches_whose_result_is_cut_otherwise(lhs_shape, lhs_spec, rhs_shape, rhs_spec, out_spec):
    lhs, rhs, dout = integers(1, *lhs_shape), integers(2, *rhs_shape), integers(3, 4, M, N)
    vjp = lambda f, lhs, rhs, dout: (f(lhs, rhs), *jax.vjp(f, lhs, rhs)[1](dout))
    expected = vjp(jnp.matmul, *map(jnp.asarray, (lhs, rhs, dout)))
    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        operands = (
            jax.device_put(x, spec)
            for x, spec in zip((lhs, rhs, dout), (lhs_spec, rhs_spec, out_spec), strict=True)
        )
        f = partial(matmul, recipe=EXACT, out_sharding=out_spec)
        found = jax.jit(partial(vjp, f))(*operands)
    for x, spec in zip(found, (out_spec, lhs_spec, rhs_spec), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, spec), x.ndim)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lhs_spec", [P(), P(None, "x")])
def test_one_lhs_for_a_batch_that_an_axis_cuts(lhs_spec):
    """The axis may cut k of lhs too: lhs is gathered, as in jnp.matmul."""
    lhs, rhs, dout = integers(1, M, K), integers(2, 4, K, N), integers(3, 4, M, N)
    vjp = lambda f, lhs, rhs, dout: (f(lhs, rhs), *jax.vjp(f, lhs, rhs)[1](dout))
    expected = vjp(jnp.matmul, *map(jnp.asarray, (lhs, rhs, dout)))
    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        placed = map(jax.device_put, (lhs, rhs, dout), (lhs_spec, P("x"), P("x")))
        found = jax.jit(partial(vjp, partial(matmul, recipe=EXACT)))(*placed)
        assert jax.typeof(found[1]).sharding.spec == P(*lhs_spec, *[None] * (2 - len(lhs_spec)))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lhs_shape, lhs_spec", [((2, M, K), P("y")), ((4, M, K), P(("y", "x")))])
def test_a_batch_that_an_axis_beside_a_shard_map_cuts(lhs_shape, lhs_spec):
    """y is manual, x stays Explicit. In lhs of one element a device of y, that one serves all."""
    lhs, rhs = integers(1, *lhs_shape), integers(2, 2, K, N)
    split = lambda x: x.reshape(2, -1, M, K)
    f = partial(matmul, recipe=EXACT)
    gradients = lambda f, lhs, rhs: jax.grad(lambda *x: f(*x).sum(), (0, 1))(lhs, rhs)
    parts = [gradients(jnp.matmul, jnp.asarray(x), jnp.asarray(rhs)) for x in split(lhs)]
    expected = np.concatenate([p[0] for p in parts]), np.sum([p[1] for p in parts], 0)
    on = mesh(AxisType.Explicit, AxisType.Explicit, shape=(2, 2))
    specs = P("y"), P()
    mapped = jax.shard_map(
        partial(gradients, f), mesh=on, in_specs=specs, out_specs=specs, axis_names={"y"}
    )
    with jax.set_mesh(on):
        found = jax.jit(mapped)(jax.device_put(lhs, lhs_spec), jax.device_put(rhs, P("x")))
        assert jax.typeof(found[1]).sharding.spec == P("x", None, None)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("case", ["rows", "reduced rhs", "unreduced result"])
def test_what_travels(case):
    """Parts of a sum stay where they are if the types say so."""
    lhs_spec, rhs_spec, out_sharding, _ = CASES[case]
    lhs, rhs = integers(1, 512, 512), integers(2, 512, 512)
    f = partial(matmul, out_sharding=out_sharding, recipe=EXACT)

    def gradient_of_rhs(lhs, rhs, dout):
        return jax.vjp(partial(f, lhs), rhs)[1](dout)[0]

    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        lhs, rhs = jax.device_put(lhs, lhs_spec), jax.device_put(rhs, rhs_spec)
        assert collectives(jax.jit(f).lower(lhs, rhs).compile()) == []
        dout_spec = P(reduced={"x"}) if case == "unreduced result" else P("x")
        dout = jax.device_put(integers(3, 512, 512), dout_spec)
        moves = collectives(jax.jit(gradient_of_rhs).lower(lhs, rhs, dout).compile())
    assert moves == (["all-reduce f32[512,512]"] if case == "rows" else [])


SQUARE = 256
DIMS = ((1,), (0,)), ((), ())
RAGGED_DIMS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
SIZES = np.int32([100, 156])
# Of parts of a sum, and of whole arrays of the same shape.
OF_PARTS = {
    "matmul": [
        lambda parts, whole: matmul(parts, whole),
        lambda parts, whole: matmul(whole, parts),
        lambda parts, whole: matmul(parts, whole, recipe="bf16"),
        lambda parts, whole: matmul(parts, quantize(whole, block=(128, 128))),
        lambda parts, whole: matmul(parts, quantize_weight(whole)),
    ],
    "dot_general": [
        lambda parts, whole: dot_general(parts, whole, DIMS),
        lambda parts, whole: dot_general(whole, parts, DIMS, recipe="bf16"),
    ],
    "einsum": [
        lambda parts, whole: einsum("mk,kn->mn", whole, parts),
        lambda parts, whole: einsum("mk,kn->mn", parts, quantize_weight(whole)),
    ],
    "ragged_dot": [
        lambda parts, whole: ragged_dot(parts, jnp.stack([whole, whole]), SIZES),
        lambda parts, whole: ragged_dot(whole, parts[None], SIZES[:1], recipe="bf16"),
    ],
    "ragged_dot_general": [
        lambda parts, whole: ragged_dot_general(parts, whole[None], SIZES[:1], RAGGED_DIMS),
    ],
    "quantize": [lambda parts, whole: quantize(parts)],
    "quantize_weight": [lambda parts, whole: quantize_weight(parts)],
}


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("op", OF_PARTS)
def test_an_unreduced_operand_is_refused(op, is_jitted):
    with jax.set_mesh(mesh(AxisType.Explicit, shape=(4,))):
        whole = integers(1, SQUARE, SQUARE)
        product = partial(jnp.matmul, out_sharding=P(unreduced={"x"}))
        parts = jax.jit(product)(*(jax.device_put(whole, s) for s in (P(None, "x"), P("x"))))
        for f in OF_PARTS[op]:
            with raises(ValueError, match=f"^{op}: operands must not be unreduced over mesh axes"):
                (jax.jit(f) if is_jitted else f)(parts, whole)


# shape, spec, new shape, new spec; on a mesh of x = 2, y = 2
RESHAPES = [
    ((8, 4), P("x"), (32,), P("x")),
    ((8, 4), P(None, "x"), (32,), P(None)),
    ((2, 4), P("x", "y"), (8,), P(("x", "y"))),
    ((4, 4), P("x", "y"), (16,), P("x")),
    ((8,), P(("x", "y")), (2, 4), P("x", "y")),
    ((8,), P(("x", "y")), (4, 2), P(("x", "y"), None)),
    ((8,), P("x"), (1, 8), P(None, "x")),
    ((6, 8), P("x", "y"), (3, 2, 8), P(None, None, "y")),
    ((1, 8, 3), P(None, "x"), (8, 3), P("x", None)),
    ((0, 8), P(None, "x"), (8, 0), P(None, None)),
]


@pytest.mark.parametrize("shape, spec, new_shape, expected", RESHAPES)
def test_reshape_keeps_the_axes_that_it_can(shape, spec, new_shape, expected):
    assert reshaped_spec(shape, spec, new_shape, dict(x=2, y=2)) == expected
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with jax.set_mesh(mesh(AxisType.Explicit, AxisType.Explicit, shape=(2, 2))):
        found = reshape(jax.device_put(x, spec), new_shape)
    assert found.sharding.spec == expected
    np.testing.assert_array_equal(found, x.reshape(new_shape))
