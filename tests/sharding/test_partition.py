"""Products on a mesh under jit: which dimensions are cut, what is moved, and that no bit changes.

Small integers and power-of-two scales make every sum exact, in any order: so results on a mesh
have the bits of those in float64, as have those on one device, also where k is cut.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from assertions import REORDERED
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh

from jax_fp8gemm import (
    Recipe,
    ScaledArray,
    matmul,
    quantize,
    quantize_both,
    scaled_matmul,
)

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
M, N, K = 512, 1024, 1024  # four axes' worth of scale blocks, and eight
exact_matmul = functools.partial(matmul, recipe=Recipe(pow2_scale=True))
both_axis_types = pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@functools.cache
def exact(*shape, seed=0):
    """Small integers times powers of two that differ from block to block, as then do the scales."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-7, 8, size=shape)
    blocks = rng.integers(0, 4, size=(*shape[:-2], *(-(-extent // 64) for extent in shape[-2:])))
    exponents = blocks.repeat(64, axis=-2).repeat(64, axis=-1)[..., : shape[-2], : shape[-1]]
    return jnp.asarray(x * 2.0**exponents, jnp.float32)


@functools.cache
def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def on_mesh(axis_type):
    return mesh(axis_type, axis_type, shape=(4, 2))


def place(mesh, operands, specs):
    # As NumPy's arrays: of one that lies on a device, JAX compiles a program to cut it.
    return [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]


def compile_and_run(function, *operands, **jit_args):
    compiled = jax.jit(function, **jit_args).lower(*operands).compile()
    return compiled, compiled(*operands)


def product(lhs, rhs):
    """exact_matmul of `exact` operands, by NumPy."""
    return np.float32(np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64))


# lhs (m, k), rhs (k, n) and the result; what is moved.
PRODUCTS = {
    "m": (P("x"), P(), P("x"), []),
    "n": (P(), P(None, "x"), P(None, "x"), []),
    "m and n": (P("x"), P(None, "y"), P("x", "y"), []),
    "m over two axes": (P(("x", "y")), P(), P(("x", "y")), []),
    "k": (P(None, "x"), P("x"), P(), ["all-reduce f32[512,1024]"]),
    "k over two axes": (P(None, ("x", "y")), P(("x", "y")), P(), ["all-reduce f32[512,1024]"]),
    "m and k": (P("x", "y"), P("y"), P("x"), ["all-reduce f32[128,1024]"]),
    "k, then n of the result": (
        P(None, "x"),
        P("x"),
        P(None, "x"),
        ["reduce-scatter f32[512,256]"],
    ),
    "m, and k of rhs by the same axis": (
        P("x"),
        P("x"),
        P("x"),
        ["all-gather f8e4m3fn[1024,1024]", "all-gather f32[8,8]"],
    ),
    "m and n, and k of rhs by the axis of m": (
        P("x"),
        P("x", "y"),
        P("x", "y"),
        ["all-gather f8e4m3fn[512,1024]", "all-gather f32[4,8]"],
    ),
}


# The same rules cut both: Explicit axes one case of each kind.
ON_EXPLICIT = ("m and n", "k", "k, then n of the result", "m, and k of rhs by the same axis")


@pytest.mark.parametrize(
    "axis_type, name",
    [*((AUTO, name) for name in PRODUCTS), *((EXPLICIT, name) for name in ON_EXPLICIT)],
)
def test_product(axis_type, name):
    lhs_spec, rhs_spec, out_spec, moved = PRODUCTS[name]
    operands = exact(M, K), exact(K, N, seed=1)
    on = on_mesh(axis_type)
    sharding = NamedSharding(on, out_spec)
    is_auto = axis_type == AUTO
    compiled, out = compile_and_run(
        functools.partial(exact_matmul, out_sharding=None if is_auto else sharding),
        *place(on, operands, (lhs_spec, rhs_spec)),
        out_shardings=sharding if is_auto else None,
    )
    assert collectives(compiled) == sorted(moved)
    assert out.sharding.is_equivalent_to(sharding, 2)
    reference.assert_same_bits(out, product(*operands))


def in_bf16_sums(lhs, rhs):
    """The product by two devices that each round the sum over their half of k."""
    halves = np.split(np.asarray(lhs), 2, axis=1), np.split(np.asarray(rhs), 2)
    total = sum(
        product(*half).astype(jnp.bfloat16).astype(np.float32) for half in zip(*halves, strict=True)
    )
    return total.astype(jnp.bfloat16).astype(np.float32)


def test_partial_sums_are_rounded_where_the_recipe_says_so():
    lhs, rhs, dout = exact(M, K), exact(K, N, seed=1), exact(M, N, seed=2)
    sums = Recipe(pow2_scale=True, reduce_dtype="bf16")
    on = mesh(AUTO, shape=(2,))
    multiply = functools.partial(exact_matmul, recipe=sums)
    _, out = compile_and_run(multiply, *place(on, (lhs, rhs), (P(None, "x"), P("x"))))
    assert not np.array_equal(out, product(lhs, rhs))
    reference.assert_same_bits(out, in_bf16_sums(lhs, rhs))
    # Of the gradient of rhs those of rows.
    placed = place(on, (lhs, rhs, dout), (P("x"), P(), P("x")))
    _, (_, _, drhs) = compile_and_run(functools.partial(vjp, multiply), *placed)
    reference.assert_same_bits(drhs, in_bf16_sums(lhs.T, dout))


def vjp(product, lhs, rhs, dout):
    """out, dlhs, drhs"""
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, *pullback(dout)


@functools.cache
def true_vjp(m, n, k, data=exact, pow2=True):
    """Operands, and results in float64."""
    operands = data(m, k), data(k, n, seed=1), data(m, n, seed=2)
    return operands, reference.matmul_vjp(*operands, pow2=pow2)


# lhs, rhs and out; what is moved, of the three products.
GRADIENTS = {
    "data parallel": (P("x"), P(), P("x"), ["all-reduce f32[1024,1024]"]),
    "fully sharded": (
        P("x"),
        P("x"),
        P("x"),
        ["all-gather f8e4m3fn[1024,1024]"]
        + ["all-gather f32[8,8]"]
        + ["reduce-scatter f32[256,1024]"],
    ),
    "columns": (
        P("x"),
        P(None, "y"),
        P("x", "y"),
        ["all-reduce f32[1024,512]", "all-reduce f32[128,1024]"],
    ),
    "rows": (
        P("x", "y"),
        P("y"),
        P("x"),
        ["all-reduce f32[128,1024]", "all-reduce f32[512,1024]"],
    ),
}


@pytest.mark.parametrize("lhs_spec, rhs_spec, out_spec, moved", GRADIENTS.values(), ids=GRADIENTS)
@both_axis_types
def test_gradients_lie_and_move_as_their_operands(axis_type, lhs_spec, rhs_spec, out_spec, moved):
    operands, expected = true_vjp(M, N, K)
    on = on_mesh(axis_type)
    specs = lhs_spec, rhs_spec, out_spec
    shardings = [NamedSharding(on, spec) for spec in (out_spec, lhs_spec, rhs_spec)]
    is_auto = axis_type == AUTO
    cut_matmul = functools.partial(exact_matmul, out_sharding=None if is_auto else shardings[0])
    compiled, results = compile_and_run(
        functools.partial(vjp, cut_matmul),
        *place(on, operands, specs),
        out_shardings=tuple(shardings) if is_auto else None,
    )
    found = collectives(compiled)
    # Over Explicit axes the scales of a gathered weight come once for each pass.
    assert (found if is_auto else sorted(set(found))) == sorted(moved)
    for x, y, sharding in zip(results, expected, shardings, strict=True):
        assert x.sharding.is_equivalent_to(sharding, 2)
        reference.assert_same_bits(x, np.float32(y))


MISALIGNED = {
    "m=136 over 4": (AUTO, (136, 256, 256), P("x"), P(None, "y"), P("x", "y")),
    "m odd": (AUTO, (77, 256, 256), P(None, "y"), P("y"), P()),
    "n=512 over 8": (AUTO, (256, 512, 256), P(), P(None, ("x", "y")), P(None, ("x", "y"))),
    "m, n, k": (EXPLICIT, (136, 200, 192), P("x", "y"), P("y"), P("x")),
}


@pytest.mark.parametrize(
    "axis_type, shape, lhs_spec, rhs_spec, out_spec", MISALIGNED.values(), ids=MISALIGNED
)
def test_shards_that_would_cut_a_scale_block(axis_type, shape, lhs_spec, rhs_spec, out_spec):
    on = on_mesh(axis_type)
    operands, expected = true_vjp(*shape, normal, pow2=False)
    sharding = NamedSharding(on, out_spec) if axis_type == EXPLICIT else None
    cut_matmul = functools.partial(matmul, out_sharding=sharding)
    cut = place(on, operands, (lhs_spec, rhs_spec, out_spec))
    results = jax.jit(functools.partial(vjp, cut_matmul))(*cut)
    for x, y in zip(results, expected, strict=True):
        # f32 sums; other scale blocks would be off by more than 1e-7.
        assert reference.calc_diff(x, y) < REORDERED


@both_axis_types
def test_scales_that_shards_would_share(axis_type):
    on = on_mesh(axis_type)
    lhs = quantize(exact(256, 192), pow2_scale=True)
    rhs = quantize(exact(512, 192, seed=1), block=(128, 128), pow2_scale=True)
    expected = jax.jit(scaled_matmul)(lhs, rhs)
    for lhs_spec, rhs_spec in ((P("x"), P(("x", "y"))), (P(None, "y"), P("x", "y"))):
        specs = [(spec, P()) for spec in (lhs_spec, rhs_spec)]
        cut = [
            ScaledArray(*place(on, (x.values, x.scale), spec), None, x.block)
            for x, spec in zip((lhs, rhs), specs, strict=True)
        ]
        reference.assert_same_bits(jax.jit(scaled_matmul)(*cut), expected)


def test_k_cut_of_random_data():
    lhs, rhs = normal(M, K), normal(K, N, seed=1)
    cut = place(on_mesh(AUTO), (lhs, rhs), (P(None, "x"), P("x")))
    (expected,) = reference.matmul_vjp(lhs, rhs)
    # f32 partial sums.
    bound = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(jax.jit(matmul)(*cut)), expected, rtol=0, atol=bound)


def test_partial_sums_are_rounded_once():
    """Not each to bf16, and accumulate_into is added once."""
    lhs, rhs = (quantize(x, pow2_scale=True) for x in (exact(M, K), exact(N, K, seed=1)))
    on = on_mesh(AUTO)
    specs = ScaledArray(P(None, "x"), P(None, "x"))
    shardings = jax.tree.map(functools.partial(NamedSharding, on), specs)
    cut = [jax.device_put(x, shardings) for x in (lhs, rhs)]
    reference.assert_same_bits(jax.jit(scaled_matmul)(*cut), scaled_matmul(lhs, rhs))
    accum = exact(M, N, seed=2)
    add = lambda lhs, rhs, accum: scaled_matmul(
        lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum
    )
    for spec in (P(), P("y"), P("x")):
        sharding = NamedSharding(on, spec)
        out = jax.jit(add, out_shardings=sharding)(*cut, jax.device_put(accum, sharding))
        reference.assert_same_bits(out, add(lhs, rhs, accum))


@pytest.mark.parametrize(
    "function",
    [
        quantize,
        functools.partial(quantize, axis=-2),
        quantize_both,
        functools.partial(quantize, block=(128, 128), with_transpose=True),
    ],
    ids=["rows", "columns", "rows and columns", "blocks"],
)
@both_axis_types
def test_quantize_where_its_operand_lies(axis_type, function):
    on = on_mesh(axis_type)
    for shape, spec in (
        ((512, 256), P("x", "y")),
        ((512, 256), P("y", None)),
        ((256, 384), P("x", "y")),  # half a block of rows, one and a half of columns
        ((2, 4, 130, 64), P("y", "x")),
    ):
        x = normal(*shape)
        compiled, out = compile_and_run(function, *place(on, [x], [spec]))
        jax.tree.map(reference.assert_same_bits, out, function(x))
        if shape != (256, 384):
            assert collectives(compiled) == []
            for leaf in jax.tree.leaves(out):
                assert not leaf.sharding.is_fully_replicated


def test_scales_follow_their_values():
    on = on_mesh(EXPLICIT)
    (x,) = place(on, [exact(M, K)], [P("x", "y")])
    rows, columns = quantize_both(x)
    assert [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves((rows, columns))] == [
        P("x", "y"),
        P("x", "y"),
        P("y", "x"),
        P("y", "x"),
    ]
    assert jax.typeof(rows.dequantize()).sharding.spec == P("x", "y")
    out = scaled_matmul(rows, quantize(exact(N, K), block=(128, 128)))
    assert jax.typeof(out).sharding.spec == P("x", None)  # summed over y
