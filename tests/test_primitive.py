"""What holds for every primitive: which implementation is lowered, and operands on a mesh."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from errors import on_cpu, raises, raises_without_kernel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import (
    FallbackWarning,
    Recipe,
    ScaledArray,
    _ffi,
    _primitive,
    dot_general,
    matmul,
    quantize,
    quantize_both,
    scaled_matmul,
)

M, N, K = 256, 384, 512


# Which implementation is lowered


def cuda_text(function, *args):
    """The program for an NVIDIA GPU, made on any machine."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text):
    """(target, {attribute: value}, line) of each custom call of ours."""
    calls = []
    for line in text.splitlines():
        if match := re.search(r"custom_call @(jax_fp8gemm_\w+)\(", line):
            config = re.search(r"config = \{([^}]*)\}", line)
            pairs = re.findall(r"(\w+) = (-?\d+) : i32", config[1])
            calls.append((match[1], {name: int(value) for name, value in pairs}, line))
    return calls


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


MODE = {"row": 0, "column": 1, "row_column": 2, "block": 3, "block_transposed": 4, "block_both": 5}


@pytest.mark.parametrize(
    "function, mode",
    [
        (quantize, "row"),
        (functools.partial(quantize, axis=-2), "column"),
        (quantize_both, "row_column"),
        (functools.partial(quantize, block=(128, 128)), "block"),
        (functools.partial(quantize, block=(128, 128), with_transpose=True), "block_both"),
    ],
)
def test_quantize_is_one_custom_call(function, mode):
    function = functools.partial(function, dtype=jnp.float8_e5m2, pow2_scale=True)
    ((target, config, _),) = custom_calls(cuda_text(function, struct(M, K)))
    assert target == _ffi.QUANTIZE_TARGET
    # input 0: bf16; source 0: x itself.
    expected = dict(mode=MODE[mode], input=0, e5m2=1, pow2_scale=1, ragged=0, source=0)
    assert config == expected


def test_scales_cross_the_boundary_with_rows_minor():
    ((_, _, line),) = custom_calls(cuda_text(quantize_both, struct(M, K)))
    layouts = [f"dense<[{x}]> : tensor<2xindex>" for x in ("1, 0", "0, 1", "1, 0", "0, 1")]
    assert f"result_layouts = [{', '.join(layouts)}]" in line


@pytest.mark.parametrize("rows", [256, 72])
def test_a_batch_of_square_blocks_is_one_custom_call(rows):
    """Also where a block would span two matrices if their rows followed each other."""
    function = functools.partial(quantize, block=(128, 128), with_transpose=True)
    for batch in ((3,), (2, 3)):
        ((_, config, _),) = custom_calls(cuda_text(function, struct(*batch, rows, K)))
        assert config["mode"] == MODE["block_both"]
        ((_, _, line),) = custom_calls(cuda_text(jax.vmap(function), struct(*batch, rows, K)))
        assert f"tensor<{math.prod(batch)}x{rows}x{K}xbf16>" in line


def test_forward_is_three_custom_calls():
    calls = custom_calls(cuda_text(matmul, struct(M, K), struct(K, N)))
    assert [target for target, *_ in calls] == [_ffi.QUANTIZE_TARGET] * 2 + [_ffi.GEMM_TARGET]
    assert [config["mode"] for _, config, _ in calls[:2]] == [MODE["row"], MODE["block_transposed"]]
    config = calls[2][1]
    assert (config["is_1d1d"], config["out_f32"], config["accumulate"]) == (0, 0, 0)


def test_backward_with_e5m2_cotangents():
    gradient = jax.grad(
        lambda *x: matmul(*x, recipe=Recipe(bwd="e5m2")).astype(jnp.float32).sum(), (0, 1)
    )
    calls = custom_calls(cuda_text(gradient, struct(M, K), struct(K, N)))
    modes = [config["mode"] for target, config, _ in calls if target == _ffi.QUANTIZE_TARGET]
    # Only gradients are wanted: the forward product goes, and what only it reads.
    assert modes == [MODE["column"], MODE["block"], MODE["row_column"]]
    gemms = [config for target, config, _ in calls if target == _ffi.GEMM_TARGET]
    formats = [(c["is_1d1d"], c["lhs_e5m2"], c["rhs_e5m2"]) for c in gemms]
    assert formats == [(0, 1, 0), (1, 0, 1)]


def test_accumulation_is_aliased_in_the_custom_call():
    def add(lhs, lhs_scale, rhs, rhs_scale, accum):
        lhs, rhs = ScaledArray(lhs, lhs_scale), ScaledArray(rhs, rhs_scale)
        return scaled_matmul(lhs, rhs, out_dtype=jnp.float32, accumulate_into=accum)

    f8, f32 = dict(dtype=jnp.float8_e4m3fn), dict(dtype=jnp.float32)
    args = struct(M, K, **f8), struct(M, 4, **f32), struct(N, K, **f8), struct(N, 4, **f32)
    ((_, config, line),) = custom_calls(cuda_text(add, *args, struct(M, N, **f32)))
    assert (config["is_1d1d"], config["out_f32"], config["accumulate"]) == (1, 1, 1)
    assert re.search(r"output_operand_alias<[^>]*operand_index = 4", line)
    layouts = [f"dense<[{x}]> : tensor<2xindex>" for x in ("1, 0", "0, 1", "1, 0", "0, 1", "1, 0")]
    assert f"operand_layouts = [{', '.join(layouts)}]" in line


@pytest.mark.parametrize("k, n, padded", [(1003, 129, (1008, 136)), (2880, 2112, (2880, 2112))])
def test_ragged_k_and_n_are_padded_to_what_the_kernel_takes(k, n, padded):
    calls = custom_calls(cuda_text(matmul, struct(65, k), struct(k, n)))
    line = calls[-1][2]
    assert f"tensor<65x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<{padded[1]}x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<65x{padded[1]}xbf16>" in line


@pytest.mark.parametrize("m, n, k", [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_empty_extents_call_no_kernel(m, n, k):
    text = cuda_text(matmul, struct(m, k), struct(k, n))
    assert _ffi.GEMM_TARGET not in text


def test_xla_implementation_calls_no_kernel():
    text = cuda_text(functools.partial(matmul, implementation="xla"), struct(M, K), struct(K, N))
    assert custom_calls(text) == []


@pytest.mark.parametrize("batched", ["lhs", "rhs"])
def test_vmap_of_one_operand_is_one_product(batched):
    in_axes = (0, None) if batched == "lhs" else (None, 0)
    args = [struct(*((3,) if d == 0 else ()), *s) for d, s in zip(in_axes, [(M, K), (K, N)])]  # noqa: B905
    calls = custom_calls(cuda_text(jax.vmap(matmul, in_axes), *args))
    assert [target for target, *_ in calls].count(_ffi.GEMM_TARGET) == 1


def test_export_for_cuda_from_any_machine():
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (_ffi.GEMM_TARGET, _ffi.QUANTIZE_TARGET)
    ]
    exported = jax.export.export(jax.jit(matmul), platforms=("cuda",), disabled_checks=checks)(
        struct(M, K), struct(K, N)
    )
    assert len(custom_calls(exported.mlir_module())) == 3
    jax.export.deserialize(exported.serialize())


@on_cpu
def test_cuda_implementation_raises_on_cpu():
    with raises_without_kernel("quantize"):
        quantize(jnp.ones((2, 2)), implementation="cuda")
    with raises_without_kernel("quantize"):
        jax.jit(lambda x: matmul(x, x, implementation="cuda"))(jnp.ones((3, 3)))


@on_cpu
def test_fallback_warns_once_and_says_why():
    _ffi.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(jnp.ones((2, 33)))
        matmul(jnp.ones((2, 34)), jnp.ones((34, 3)))
    ours = [w for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(ours) == 1
    assert "lowering for cpu, not for an NVIDIA GPU" in str(ours[0].message)


@on_cpu
def test_asking_for_the_reference_does_not_warn():
    _ffi.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul(jnp.ones((2, 35)), jnp.ones((35, 3)), implementation="xla")


def test_gpu_without_the_kernels_falls_back_when_lowering(monkeypatch):
    monkeypatch.setattr(_primitive, "_has_gpu", lambda: True)
    monkeypatch.setattr(_ffi, "unavailable_reason", lambda: "needs an sm90a device; got A100")
    _ffi.warn_once.cache_clear()
    with pytest.warns(FallbackWarning, match="needs an sm90a device; got A100"):
        assert custom_calls(cuda_text(quantize, struct(3, 77))) == []
    with raises(RuntimeError, match="implementation='cuda' cannot be used; got: needs an sm90a"):
        cuda_text(functools.partial(quantize, implementation="cuda"), struct(3, 77))


# Operands on a mesh


def mesh(*axis_types, shape=None):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    shape = shape or (4,)
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=axis_types)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@functools.cache
def operands():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, K), (K, N)))


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
    assert reference.calc_diff(found, expected) < 1e-9


SPECS = {
    "m": (P("x"), P(), None),
    "k": (P(None, "x"), P("x"), P("x")),
    "n": (P(), P(None, "x"), None),
    "m and k": (P("x"), P("x"), None),
    "m and n": (P("x"), P(None, "x"), P("x")),
}


@pytest.mark.parametrize("lhs_spec, rhs_spec, out_spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_sharded_operands_give_the_unsharded_result(axis_type, lhs_spec, rhs_spec, out_spec):
    on = mesh(axis_type)
    specs = zip(operands(), (lhs_spec, rhs_spec), strict=True)
    lhs, rhs = (jax.device_put(x, NamedSharding(on, spec)) for x, spec in specs)
    needs_spec = axis_type == EXPLICIT and out_spec is not None
    kwargs = dict(out_sharding=NamedSharding(on, out_spec)) if needs_spec else {}
    gradients, out = value_and_gradients(lhs, rhs, **kwargs)
    expected_out, *expected_gradients = unsharded()
    assert_equal(out, expected_out)
    for x, expected, operand in zip(gradients, expected_gradients, (lhs, rhs), strict=True):
        assert_equal(x, expected)
        assert jax.typeof(x).sharding.spec == jax.typeof(operand).sharding.spec


@pytest.mark.parametrize("lhs_spec", [P("x"), P(None, "x"), P("x", "y"), P(("x", "y"))])
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
    dims = (((1,), (0,)), ((), ()))
    assert dot_general(lhs, rhs, dims).sharding == out.sharding


def test_sharded_k_needs_an_out_sharding_as_in_lax():
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(mesh(EXPLICIT), P(None, "x")))
    rhs = jax.device_put(rhs, NamedSharding(mesh(EXPLICIT), P("x")))
    with pytest.raises(Exception, match="out_sharding"):
        matmul(lhs, rhs)


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


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_partial_manual_shard_map(axis_type):
    on = mesh(axis_type, axis_type, shape=(2, 2))
    lhs, rhs = operands()
    lhs = jax.device_put(lhs, NamedSharding(on, P("x")))
    rhs = jax.device_put(rhs, NamedSharding(on, P(None, "y")))
    rows = jax.shard_map(
        matmul, mesh=on, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
    )
    assert_equal(jax.jit(rows)(lhs, rhs), unsharded()[0])


def test_shard_map_lowers_to_the_kernels():
    lhs, rhs = operands()
    rows = jax.shard_map(matmul, mesh=mesh(AUTO), in_specs=(P("x"), P()), out_specs=P("x"))
    calls = custom_calls(cuda_text(rows, lhs, rhs))
    assert len(calls) == 3
    assert f"tensor<{M // 4}x{K}xf8E4M3FN>" in calls[2][2]
