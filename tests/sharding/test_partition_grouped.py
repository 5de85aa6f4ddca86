"""Grouped products on a mesh under jit: what is moved, and that no bit changes (test_partition)."""

import functools

import jax
import jax.numpy as jnp
import moe_cases
import numpy as np
import pytest
import ragged_cases
import reference
import undefined_rows
from assertions import REORDERED, assert_all_same_bits
from errors import raises
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh
from ragged_cases import contraction, int32
from test_partition import (
    AUTO,
    EXPLICIT,
    compile_and_run,
    exact,
    normal,
    on_mesh,
    place,
)

from jax_fp8gemm import (
    BF16,
    Recipe,
    ScaledArray,
    quantize,
    quantize_ragged,
    ragged_dot,
    scaled_ragged_dot,
    scaled_ragged_wgrad,
)
from jax_fp8gemm._primitives.grouped_gemm import grouped_gemm
from jax_fp8gemm.moe import moe_mlp

M, N, K, G = 256, 512, 512, 4
SIZES = int32((70, 0, 100, 50))  # an empty group; groups in several shards; 36 rows of no group
recipe = Recipe(pow2_scale=True)
exact_ragged_dot = functools.partial(ragged_dot, recipe=recipe)
vjp = functools.partial(ragged_cases.vjp, recipe=recipe)


def problem(m=M, n=N, k=K, g=G, data=exact):
    """lhs, rhs, sizes, dout"""
    return data(m, k), data(g, k, n, seed=1), SIZES[:g], data(m, n, seed=2)


@functools.cache
def exact_results():
    return [np.float32(x) for x in ragged_cases.truth(*problem(), pow2=True)]


def run_vjp(on, operands, specs, out_spec):
    """What moves, and vjp of operands (lhs, rhs, sizes, dout) with the gradients as they lie."""
    is_auto = not on.explicit_axes
    sharding = NamedSharding(on, out_spec)
    placed = place(on, operands, (*specs, P(), out_spec))
    compiled, results = compile_and_run(
        functools.partial(vjp, out_sharding=None if is_auto else sharding),
        *placed,
        out_shardings=(sharding, *(x.sharding for x in placed[:2])) if is_auto else None,
    )
    for x, like in zip(results, (placed[3], *placed[:2]), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    return collectives(compiled), results


def sums(*shapes):
    return [f"all-reduce f32[{shape}]" for shape in shapes]


def weight_gradient(tokens, n, gathered=(), moved_n=128):
    """What moves for drhs where tokens are cut: to columns, of which those of dout are gathered."""
    return [
        *[f"all-gather {x}" for x in (f"f8e4m3fn[{n},640]", *gathered, f"f32[{n},5]")],
        *[f"all-to-all f32[{tokens},{x}]" for x in sorted((128, moved_n))],
    ]


# lhs (m, k), rhs (g, k, n) and out; what moves, of the three products. By XLA, drhs is gathered
# where its operand is not cut.
CUTS = {
    "m": (P("x"), P(), P("x"), weight_gradient(64, 512, ["f32[4,512,512]"])),
    "k and g": (P(None, "x"), P("y", "x"), P(), sums("256,128", "256,512")),
    "m and n": (
        P("x"),
        P(None, None, "y"),
        P("x", "y"),
        sorted(weight_gradient(64, 256, ["f32[4,512,256]"], 64) + sums("64,512")),
    ),
    "m, and k of rhs by the same axis": (
        P("x"),
        P(None, "x"),
        P("x"),
        sorted(
            ["all-gather f8e4m3fn[4,512,512]", "all-gather f32[4,4,4]"] + weight_gradient(64, 512)
        ),
    ),
    "m and g": (
        P("x"),
        P("y"),
        P("x"),
        sorted(weight_gradient(64, 512, ["f32[2,512,512]"]) + sums("64,512", "64,512")),
    ),
}


# The last over Explicit axes, to which the rules are the same.
AXIS_TYPES = [*[AUTO] * (len(CUTS) - 1), EXPLICIT]


@pytest.mark.parametrize("cut, axis_type", [*zip(CUTS, AXIS_TYPES, strict=True)])
def test_product_and_gradients(cut, axis_type):
    lhs_spec, rhs_spec, out_spec, moved = CUTS[cut]
    found, results = run_vjp(on_mesh(axis_type), problem(), (lhs_spec, rhs_spec), out_spec)
    assert found == sorted(moved)
    assert_all_same_bits(results, exact_results())


def test_k_sharded_explicitly_needs_an_out_sharding_as_in_lax():
    lhs, rhs = place(on_mesh(EXPLICIT), problem()[:2], (P(None, "x"), P(None, "x")))
    with raises(Exception, match="out_sharding"):
        jax.make_jaxpr(ragged_dot)(lhs, rhs, SIZES)


def test_shards_that_would_cut_a_scale_block():
    """Or that are not even: here m alone may be cut, by y."""
    on = on_mesh(AUTO)
    operands = problem(250, 200, 192, 3, normal)
    cut = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(on, P(*spec)))

    def vjp_of_cut(lhs, rhs, sizes, dout):
        return vjp(cut(lhs, "x", "y"), cut(rhs, "y", "x"), sizes, cut(dout, "y", "x"))

    expected = ragged_cases.truth(*operands, pow2=True)
    for x, y in zip(jax.jit(vjp_of_cut)(*operands), expected, strict=True):
        # f32 sums; other scale blocks would be off by more than 1e-7.
        assert reference.calc_diff(x, y) < REORDERED


# Sizes that no caller should pass, too.
ANY_SIZES = [
    (0, 0, 0, 0),
    (256, 0, 0, 0),
    (0, 0, 0, 999),
    (64, 64, 64, 64),
    (1, 63, 65, -5),
    (200, 2**31 - 1, 2**31 - 1, 7),
]


def scaled(*shape, seed=0, block=(1, 128)):
    return quantize(exact(*shape, seed=seed), block=block, pow2_scale=True)


def place_scaled(on, x, spec):
    return ScaledArray(*place(on, (x.values, x.scale), (spec, spec)), None, x.block)


@pytest.mark.parametrize(
    "axis_types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)], ids=str
)
def test_rows_and_groups_cut_for_any_sizes(axis_types):
    on = mesh(*axis_types, shape=(4, 2))
    product = jax.jit(scaled_ragged_dot)
    operands = scaled(M, 128), scaled(G, 256, 128, seed=1, block=(128, 128))
    cut = [place_scaled(on, x, spec) for x, spec in zip(operands, (P("x"), P("y")), strict=True)]
    for sizes in ANY_SIZES:
        out = product(*cut, int32(sizes))
        assert out.sharding.is_equivalent_to(NamedSharding(on, P("x")), 2)
        reference.assert_same_bits(out, product(*operands, int32(sizes)))


def test_undefined_rows_are_zero_where_devices_add_their_groups(monkeypatch):
    """By x. Where x cuts k, each device has all groups: rows of none stay undefined."""
    undefined_rows.poison(monkeypatch)
    operands = scaled(M, 256), scaled(G, 256, 256, seed=1, block=(128, 128))
    first_row = int32((5,))
    run = lambda *of, unused="undefined": grouped_gemm(*of, jnp.float32, unused_rows=unused)
    is_used = (np.arange(M) >= 5) & (np.arange(M) < 5 + SIZES.sum())
    expected = np.asarray(run(*operands, SIZES, first_row, unused="zero"))
    on = mesh(AUTO, AUTO, shape=(2, 4))
    for specs, are_zero in (((P(), P("x")), True), ((P(None, "x"), P(None, None, "x")), False)):
        cut = [place_scaled(on, x, spec) for x, spec in zip(operands, specs, strict=True)]
        found = np.asarray(jax.jit(run)(*cut, SIZES, first_row))
        reference.assert_same_bits(found[is_used], expected[is_used])
        assert ((found[~is_used] == 0) if are_zero else np.isnan(found[~is_used])).all()


def test_masked_form():
    on = on_mesh(AUTO)
    operands = scaled(G, 64, 128), scaled(G, 256, 128, seed=1, block=(128, 128))
    specs = P("y", "x"), P("y")
    cut = [place_scaled(on, x, spec) for x, spec in zip(operands, specs, strict=True)]
    sizes = int32((5, 0, 999, 40))
    compiled, out = compile_and_run(scaled_ragged_dot, *cut, sizes)
    assert collectives(compiled) == []
    reference.assert_same_bits(out, jax.jit(scaled_ragged_dot)(*operands, sizes))


def test_columns_of_all_tokens():
    on = on_mesh(EXPLICIT)
    x = normal(M, 256)
    quantized = functools.partial(quantize_ragged, group_sizes=SIZES)
    for spec, moved in ((P("x"), ["all-to-all f32[64,64]"]), (P(None, "x"), [])):
        compiled, out = compile_and_run(quantized, *place(on, [x], [spec]))
        assert collectives(compiled) == moved
        assert jax.typeof(out.values).sharding.spec == P("x", None)
        jax.tree.map(reference.assert_same_bits, out, quantized(x))


def test_contraction_cut_by_groups():
    """Each device has its groups' columns, and adds its groups' results."""
    lhs, rhs, accum = exact(M, 64), exact(M, 96, seed=1), exact(G, 64, 96, seed=2)
    (cut,) = place(on_mesh(AUTO), [accum], [P("x", "y")])

    @jax.jit
    def contract(sizes, accum):
        columns = [quantize_ragged(x, sizes, pow2_scale=True) for x in (lhs, rhs)]
        return scaled_ragged_wgrad(*columns, sizes, out_dtype=jnp.float32, accumulate_into=accum)

    assert collectives(contract.lower(SIZES, cut).compile()) == []
    for sizes in ANY_SIZES:
        out = contract(int32(sizes), cut)
        assert out.sharding.is_equivalent_to(cut.sharding, 3)
        reference.assert_same_bits(out, contract(int32(sizes), accum))


def test_ragged_contraction():
    on = on_mesh(EXPLICIT)
    operands = exact(M, 256), exact(M, 128, seed=1)
    contract = lambda lhs, rhs: contraction(lhs, rhs, SIZES, recipe=recipe)
    compiled, out = compile_and_run(contract, *place(on, operands, (P(None, "x"), P(None, "y"))))
    assert collectives(compiled) == []
    assert jax.typeof(out).sharding.spec == P(None, "x", "y")
    reference.assert_same_bits(out, jax.jit(contract)(*operands))


def test_vmap_and_group_offset_in_a_scan():
    """Of five groups the last two; the first of them starts in the middle of a shard."""
    sizes = int32([(60, 0, 20, 100, 30), (5, 5, 5, 200, 300)])

    def steps(lhs, rhs):
        product = lambda x, sizes: exact_ragged_dot(x, rhs, sizes, group_offset=int32([3]))
        step = lambda x, _: (jax.vmap(product)(x, sizes) / 2**20, None)
        return jax.lax.scan(step, lhs, None, length=2)[0]

    operands = exact(2, M, 256), exact(2, 256, 256, seed=1)
    cut = place(on_mesh(EXPLICIT), operands, (P(None, "x", "y"), P(None, None, "y")))
    # k is cut by y, as n is; sums of the second step's products round.
    assert reference.calc_diff(jax.jit(steps)(*cut), jax.jit(steps)(*operands)) < REORDERED


@pytest.mark.parametrize("offset", [-1, 2, 9])
def test_a_group_offset_beyond_the_groups_without_fp8(offset):
    """It is clamped to 0..2, also where devices have groups of their own."""
    sizes = int32((3, 70, 0, 100, 20, 60))
    lhs, rhs = normal(M, 24), normal(G, 24, 20, seed=1)
    run = functools.partial(ragged_dot, recipe=BF16, group_offset=int32([offset]))
    expected = np.zeros((M, 20))
    first = min(max(offset, 0), 2)
    starts = np.cumsum([0, *sizes])
    for w, start, end in zip(rhs, starts[first:], starts[first + 1 : first + G + 1], strict=False):
        expected[start:end] = np.asarray(lhs[start:end], float) @ np.asarray(w, float)
    cut = place(mesh(AUTO, shape=(2,)), (lhs, rhs), (P(), P("x")))
    np.testing.assert_allclose(jax.jit(run)(*cut, sizes), expected, atol=1e-4)


def test_moe_mlp_of_sharded_rows():
    """Its gradients on a mesh are in test_moe_mlp_program."""
    operands = moe_cases.problem(m=M, d=128, f=128, g=G)[:3]
    cut = place(on_mesh(EXPLICIT), operands, (P("x"), P(), P()))
    compiled, out = compile_and_run(moe_mlp, *cut, SIZES)
    assert collectives(compiled) == []
    assert jax.typeof(out).sharding.spec == P("x", None)
