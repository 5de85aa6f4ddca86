"""Products on a mesh with rows in several dimensions, (batch, rows, k), each of which it may cut.

Bits are those of one device, as in test_partition.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
import reference
from assertions import REORDERED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from test_partition import (
    AUTO,
    EXPLICIT,
    compile_and_run,
    exact,
    exact_matmul,
    normal,
    place,
    vjp,
)
from test_primitive import cuda_text, custom_calls, struct

from jax_fp8gemm import Recipe, dot_general, matmul, quantize, quantize_both

B, ROWS, K, N = 4, 256, 512, 256  # two scale blocks of rows and of n, four of k
BATCH_AND_ROWS = P("x", "y")


def on_mesh(axis_type):
    return mesh(axis_type, axis_type, shape=(2, 2))


@functools.cache
def flat_vjp(num_rows, product, data):
    """Operands and results on one device, all rows in one dimension."""
    operands = data(num_rows, K), data(K, N, seed=1), data(num_rows, N, seed=2)
    return operands, jax.jit(functools.partial(vjp, product))(*operands)


def unsharded_vjp(*rows, product=exact_matmul, data=exact):
    """The same, in their own dimensions."""
    (lhs, rhs, dout), (out, dlhs, drhs) = flat_vjp(math.prod(rows), product, data)
    unfold = lambda x: x.reshape(*rows, x.shape[-1])
    return (unfold(lhs), rhs, unfold(dout)), (unfold(out), unfold(dlhs), drhs)


# Once for both passes; over Explicit axes the scales twice.
WEIGHTS_GATHERED = ["all-gather f8e4m3fn[512,256]", "all-gather f32[4,2]"]
# lhs, rhs and out; what is moved, of the three products. The same rules cut along Auto and Explicit
# axes: only the first case runs along both.
GRADIENTS = {
    "batch and rows": (AUTO, BATCH_AND_ROWS, P(), BATCH_AND_ROWS, ["all-reduce f32[512,256]"]),
    "explicitly": (EXPLICIT, BATCH_AND_ROWS, P(), BATCH_AND_ROWS, ["all-reduce f32[512,256]"]),
    "rows": (AUTO, P(None, "y"), P(), P(None, "y"), ["all-reduce f32[512,256]"]),
    "batch over two axes": (AUTO, P(("x", "y")), P(), P(("x", "y")), ["all-reduce f32[512,256]"]),
    "and k of rhs by the axis of the rows": (
        AUTO,
        BATCH_AND_ROWS,
        P("y"),
        BATCH_AND_ROWS,
        # Scattered over y, then summed over x.
        [*WEIGHTS_GATHERED, "reduce-scatter f32[256,256]", "all-reduce f32[256,256]"],
    ),
    "and k of rhs by both axes": (
        EXPLICIT,
        BATCH_AND_ROWS,
        P(("x", "y")),
        BATCH_AND_ROWS,
        [*WEIGHTS_GATHERED, "all-gather f32[4,2]", "reduce-scatter f32[128,256]"],
    ),
    "rows and n": (
        AUTO,
        P(None, "x"),
        P(None, "y"),
        P(None, "x", "y"),
        ["all-reduce f32[4,128,512]", "all-reduce f32[512,128]"],
    ),
    "rows and n by the same axis": (
        EXPLICIT,
        BATCH_AND_ROWS,
        P(None, "y"),
        P("x", None, "y"),
        # lhs along its rows, for both products that read it; dlhs summed onto its shards.
        ["all-gather f8e4m3fn[2,256,512]", "all-gather f32[2,256,4]"]
        + ["all-gather f8e4m3fn[512,2,256]", "all-gather f32[512,2,2]"]
        + ["reduce-scatter f32[2,128,512]", "all-reduce f32[512,128]"],
    ),
    "rows and k": (
        EXPLICIT,
        P(None, "x", "y"),
        P("y"),
        P(None, "x"),
        ["all-reduce f32[4,128,256]", "all-reduce f32[256,256]"],
    ),
}


@pytest.mark.parametrize("axis_type, lhs, rhs, out, moved", GRADIENTS.values(), ids=GRADIENTS)
def test_product_and_gradients(axis_type, lhs, rhs, out, moved):
    specs = lhs, rhs, out
    operands, expected = unsharded_vjp(B, ROWS)
    on = on_mesh(axis_type)
    lhs, rhs, out = (NamedSharding(on, spec) for spec in specs)
    is_auto = axis_type == AUTO
    product = functools.partial(exact_matmul, out_sharding=None if is_auto else out)
    compiled, results = compile_and_run(
        functools.partial(vjp, product),
        *place(on, operands, specs),
        out_shardings=(out, lhs, rhs) if is_auto else None,
    )
    assert collectives(compiled) == sorted(moved)
    for x, y, sharding in zip(results, expected, (out, lhs, rhs), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        reference.assert_same_bits(x, y)


@pytest.mark.parametrize(
    "rows, moved",
    [
        # Half a scale block of rows on each device: gathered along y.
        ((8, 128), ["[4,128,256]", "[4,128,512]"]),
        # Rows that are no whole scale blocks, of two batch elements, and of eight.
        ((2, 136), ["[272,256]", "[272,512]"]),
        ((2, 8, 64), []),
    ],
)
def test_scale_blocks_of_rows_stay_whole(rows, moved):
    operands, expected = unsharded_vjp(*rows, product=matmul, data=normal)
    cut = place(on_mesh(AUTO), operands, (BATCH_AND_ROWS, P(), BATCH_AND_ROWS))
    compiled, results = compile_and_run(functools.partial(vjp, matmul), *cut)
    gathered = [text for text in collectives(compiled) if "all-gather" in text]
    assert gathered == [f"all-gather f32{shape}" for shape in moved]
    for x, y in zip(results, expected, strict=True):
        # Sums in another order; other scale blocks would be off by more than 1e-7.
        assert reference.calc_diff(x, y) < REORDERED


def test_forward_alone_needs_no_whole_blocks_of_rows():
    operands = normal(2, 136, 256), normal(256, 128, seed=1)
    cut = place(on_mesh(AUTO), operands, (BATCH_AND_ROWS, P()))
    compiled, out = compile_and_run(matmul, *cut)
    assert collectives(compiled) == []
    reference.assert_same_bits(out, jax.jit(matmul)(*operands))


def heads(lhs, rhs):
    dims = (((2, 3), (0, 1)), ((), ()))
    return dot_general(lhs, rhs, dims, recipe=Recipe(pow2_scale=True))


# A product, the shapes and shardings of its operands.
OTHER_PRODUCTS = {
    "dot_general": (heads, ((2, 256, 2, 64), BATCH_AND_ROWS), ((2, 64, 128), P())),
    "vmap": (
        jax.vmap(exact_matmul, (0, None)),
        ((2, 256, 128), BATCH_AND_ROWS),
        ((128, 128), P()),
    ),
    "batches in two dimensions": (
        exact_matmul,
        ((4, 2, 128, 128), BATCH_AND_ROWS),
        ((4, 2, 128, 128), BATCH_AND_ROWS),
    ),
}


@pytest.mark.parametrize("product, lhs, rhs", OTHER_PRODUCTS.values(), ids=OTHER_PRODUCTS)
def test_other_products_move_nothing(product, lhs, rhs):
    operands = exact(*lhs[0]), exact(*rhs[0], seed=1)
    cut = place(on_mesh(EXPLICIT), operands, (lhs[1], rhs[1]))
    compiled, out = compile_and_run(product, *cut)
    assert collectives(compiled) == []
    assert jax.typeof(out).sharding.spec == P("x", "y", *(None,) * (out.ndim - 2))
    reference.assert_same_bits(out, jax.jit(product)(*operands))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_quantize_where_its_operand_lies(axis_type):
    def all_kinds(x):
        return quantize_both(x), quantize(x, block=(128, 128), with_transpose=True)

    x = normal(2, 256, 256)
    compiled, found = compile_and_run(all_kinds, *place(on_mesh(axis_type), [x], [BATCH_AND_ROWS]))
    assert collectives(compiled) == []
    jax.tree.map(reference.assert_same_bits, found, jax.jit(all_kinds)(x))
    rows, columns = BATCH_AND_ROWS, P("x", None, "y")
    on = on_mesh(axis_type)
    for leaf, spec in zip(
        jax.tree.leaves(found), (rows, rows, columns, columns, rows, rows, columns), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(NamedSharding(on, spec), 3)


@pytest.mark.parametrize("spec", [BATCH_AND_ROWS, P(None, "y"), P(("x", "y"))], ids=str)
def test_type_is_that_of_jnp_matmul(spec):
    lhs = jax.ShapeDtypeStruct(
        (B, ROWS, K), jnp.float32, sharding=NamedSharding(on_mesh(EXPLICIT), spec)
    )
    rhs = jax.ShapeDtypeStruct((K, N), jnp.float32)
    found, expected = (jax.eval_shape(op, lhs, rhs) for op in (matmul, jnp.matmul))
    assert found == expected
    assert found.sharding == expected.sharding


@pytest.mark.parametrize("rows", [(2, 128), (3, 72), (2, 4, 64)], ids=str)
def test_one_device_runs_the_same_kernels_as_of_rows_in_one_dimension(rows):
    gradients = jax.value_and_grad(lambda *x: matmul(*x).astype(jnp.float32).sum(), (0, 1))
    found, expected = (
        cuda_text(gradients, struct(*lhs, K), struct(K, N)) for lhs in (rows, (math.prod(rows),))
    )
    calls = lambda text: [(target, config) for target, config, _ in custom_calls(text)]
    assert calls(found) == calls(expected)
    for moved in ("stablehlo.transpose", "stablehlo.while"):
        assert found.count(moved) == expected.count(moved)


def test_gradient_in_bf16_of_rows_in_several_dimensions():
    gradient = jax.grad(lambda *x: (matmul(*x, recipe=Recipe(wgrad="bf16")) ** 2).sum(), 1)
    lhs, rhs = normal(2, 3, 128), normal(128, 8, seed=1)
    expected = gradient(lhs.reshape(-1, 128), rhs)
    assert reference.calc_diff(gradient(lhs, rhs), expected) < REORDERED
