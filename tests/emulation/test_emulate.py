"""implementation="emulate" against the bit model, and under jit, grad, vmap, scan and a mesh."""

import re
from functools import partial

import bit_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from bit_model import E4M3, E5M2
from jax.sharding import NamedSharding, PartitionSpec

import jax_fp8gemm as jf
from jax_fp8gemm._runtime import extension

KINDS = {"1d2d": (128, 128), "1d1d": (1, 128)}
kinds = pytest.mark.parametrize("kind", KINDS)
emulated = partial(jf.scaled_matmul, out_dtype=jnp.float32, implementation="emulate")


def _scaled(values, scale, block=(1, 128)):
    return jf.ScaledArray(jnp.asarray(values), jnp.asarray(scale), block=block)


def _operand(rng, shape, fmt, block, exponents=(-8, 8)):
    """Any finite codes, and scales of any exponent in a range."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    values = np.where(np.isfinite(codes.view(fmt).astype(np.float32)), codes, 0).view(fmt)
    size = reference.scale_shape(shape, block)
    scale = np.ldexp(rng.uniform(1, 2, size), rng.integers(*exponents, size)).astype(np.float32)
    return values, scale


def _case(kind, formats=(E4M3, E4M3), shape=(9, 136, 300), seed=0, exponents=(-8, 8)):
    rng, (m, n, k) = np.random.default_rng(seed), shape
    lhs = _operand(rng, (m, k), formats[0], (1, 128), exponents)
    return *lhs, *_operand(rng, (n, k), formats[1], KINDS[kind], exponents)


def _emulate(case, kind, **how):
    lhs, lhs_scale, rhs, rhs_scale = case
    return emulated(_scaled(lhs, lhs_scale), _scaled(rhs, rhs_scale, KINDS[kind]), **how)


# Products of scales, and then sums, are subnormal or overflow.
@pytest.mark.parametrize("exponents", [(-8, 8), (-80, -55), (50, 64)], ids=str)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@kinds
def test_products_equal_the_bit_model(kind, formats, exponents):
    case = _case(kind, formats, exponents=exponents)
    expected = bit_model.gemm(*case)
    assert bit_model.same_bits(_emulate(case, kind), expected).all()
    accum = expected[::-1] * np.float32(-0.7)
    out = _emulate(case, kind, accumulate_into=jnp.asarray(accum))
    with np.errstate(invalid="ignore", over="ignore"):
        assert bit_model.same_bits(out, bit_model.gemm(*case, accum=accum)).all()


@kinds
def test_more_rows_than_are_computed_at_a_time(kind):
    case = _case(kind, shape=(300, 136, 128))
    reference.assert_same_bits(_emulate(case, kind), bit_model.gemm(*case))


def test_groups_have_the_bits_of_products_alone():
    rng, sizes = np.random.default_rng(1), (0, 150, 3)
    lhs = _operand(rng, (160, 200), E4M3, (1, 128))
    rhs = [_operand(rng, (136, 200), E4M3, (128, 128)) for _ in sizes]
    out = jf.scaled_ragged_dot(
        _scaled(*lhs),
        _scaled(*map(np.stack, zip(*rhs, strict=True)), block=(128, 128)),
        jnp.asarray(sizes),
        out_dtype=jnp.float32,
        implementation="emulate",
    )
    expected = np.zeros((160, 136), np.float32)
    for i, (start, end) in enumerate(reference.row_ranges(sizes, 160)):
        if end > start:
            expected[start:end] = bit_model.gemm(lhs[0][start:end], lhs[1][start:end], *rhs[i])
    reference.assert_same_bits(out, expected)


def test_weight_gradients_have_the_bits_of_products_alone():
    rng, sizes, t = np.random.default_rng(2), (130, 0, 128), 512
    lhs, rhs = (_operand(rng, (rows, t), E4M3, (1, 128)) for rows in (140, 24))
    accum = rng.standard_normal((3, 140, 24)).astype(np.float32)
    out = jf.scaled_ragged_wgrad(
        _scaled(*lhs),
        _scaled(*rhs),
        jnp.asarray(sizes),
        accumulate_into=jnp.asarray(accum),
        implementation="emulate",
    )
    first = 0
    for i, size in enumerate(sizes):
        blocks = slice(first, first + -(-size // 128))
        columns = slice(blocks.start * 128, blocks.stop * 128)
        parts = [x for q in (lhs, rhs) for x in (q[0][:, columns], q[1][:, blocks])]
        expected = bit_model.gemm(*parts, accum=accum[i]) if size else accum[i]
        reference.assert_same_bits(out[i], expected, f"group {i}")
        first = blocks.stop


def _grads(implementation, lhs, rhs):
    loss = lambda lhs, rhs: jf.matmul(lhs, rhs, implementation=implementation).sum()
    return jax.grad(loss, (0, 1))(lhs, rhs)


def test_jit_vmap_and_scan_change_no_bit():
    rng = np.random.default_rng(3)
    lhs, rhs = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 9, 40), (40, 24)))
    grads = jax.jit(partial(_grads, "emulate"))
    alone = [grads(x, rhs) for x in lhs]
    mapped = jax.jit(jax.vmap(partial(_grads, "emulate"), (0, None)))(lhs, rhs)
    scanned = jax.lax.scan(lambda _, x: (None, _grads("emulate", x, rhs)), None, lhs)[1]
    for i, expected in enumerate(alone):
        for other in (mapped, scanned):
            jax.tree.map(lambda x, y, i=i: reference.assert_same_bits(x[i], y), other, expected)
    # The reference is close; so they are gradients.
    for x, y in zip(alone[0], _grads("xla", lhs[0], rhs), strict=True):
        assert reference.calc_diff(x, y) < 1e-4


@pytest.mark.parametrize("spec", [("x", None), (None, None)], ids=str)
def test_a_mesh_that_cuts_rows_changes_no_bit(spec):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, lhs_scale, rhs, rhs_scale = _case("1d2d", shape=(16, 136, 256))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    cut = _scaled(*(jax.device_put(x, sharding) for x in (lhs, lhs_scale)))
    out = jax.jit(emulated)(cut, _scaled(rhs, rhs_scale, (128, 128)))
    reference.assert_same_bits(out, bit_model.gemm(lhs, lhs_scale, rhs, rhs_scale))


def test_in_a_shard_map():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    case = _case("1d1d", shape=(16, 24, 256))
    operands = _scaled(*case[:2]), _scaled(*case[2:])
    specs = PartitionSpec("x"), PartitionSpec()
    run = jax.shard_map(emulated, mesh=mesh, in_specs=specs, out_specs=specs[0])
    reference.assert_same_bits(jax.jit(run)(*operands), bit_model.gemm(*case))


@pytest.mark.parametrize("op", [jf.matmul, jf.quantize])
def test_no_warning_and_no_kernel(op):
    operands = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * (2 if op is jf.matmul else 1)
    run = jax.jit(partial(op, implementation="emulate"))
    # On a CPU the quantisers, whose reference has the bits of the kernel, call a function in C++.
    for platform, called in (("cpu", {extension.QUANTIZE_BLOCKS_TARGET}), ("cuda", set())):
        text = run.trace(*operands).lower(lowering_platforms=(platform,)).as_text()
        assert set(re.findall(r"custom_call @(jax_fp8gemm_\w+)", text)) == called
