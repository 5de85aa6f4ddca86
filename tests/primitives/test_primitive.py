"""Which implementation of a primitive is lowered, and how it is called."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from errors import on_cpu, raises, raises_without_kernel
from jax.interpreters import partial_eval

from jax_fp8gemm import (
    EXPORT_CHECKS,
    FallbackWarning,
    Recipe,
    ScaledArray,
    matmul,
    quantize,
    quantize_both,
    scaled_matmul,
)
from jax_fp8gemm._primitives import fallback
from jax_fp8gemm._runtime import extension
from jax_fp8gemm.moe import moe_layer

M, N, K = 256, 384, 512


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


MODE = {
    "row": 0,
    "column": 1,
    "row_column": 2,
    "block": 3,
    "block_transposed": 4,
    "block_both": 5,
    "row_block_transposed": 6,
}


@pytest.mark.parametrize(
    "function, mode",
    [
        (quantize, "row"),
        (functools.partial(quantize, axis=-2), "column"),
        (quantize_both, "row_column"),
        (functools.partial(quantize, block=(128, 128)), "block"),
        (functools.partial(quantize, block=(128, 128), with_transpose=True), "block_both"),
        (functools.partial(quantize, block=(128, 128), with_transpose="only"), "block_transposed"),
    ],
)
def test_quantize_is_one_custom_call(function, mode):
    function = functools.partial(function, dtype=jnp.float8_e5m2, pow2_scale=True)
    ((target, config, _),) = custom_calls(cuda_text(function, struct(M, K)))
    assert target == extension.QUANTIZE_TARGET
    # input 0: bf16; source 0: x itself, without an activation and its constants.
    expected = dict(
        mode=MODE[mode], input=0, e5m2=1, pow2_scale=1, ragged=0, padded=0, source=0, paired=0
    )
    assert config == expected | dict(activation=0, limit=0, alpha=0, up_offset=0)


def test_squares_of_more_matrices_than_a_grid_has_rows_take_several_calls():
    function = functools.partial(quantize, block=(128, 128), with_transpose=True)
    calls = custom_calls(cuda_text(function, struct(2 * 65535 + 1, 3, 5)))
    assert len(calls) == 3 and all(config["mode"] == 5 for _, config, _ in calls)
    assert len(custom_calls(cuda_text(function, struct(65535, 3, 5)))) == 1


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
    assert [target for target, *_ in calls] == [extension.QUANTIZE_TARGET] * 2 + [
        extension.GEMM_TARGET
    ]
    assert [config["mode"] for _, config, _ in calls[:2]] == [MODE["row"], MODE["block_transposed"]]
    config = calls[2][1]
    assert (config["is_1d1d"], config["out_f32"], config["accumulate"]) == (0, 0, 0)


def test_backward_with_e5m2_cotangents():
    gradient = jax.grad(
        lambda *x: matmul(*x, recipe=Recipe(bwd="e5m2")).astype(jnp.float32).sum(), (0, 1)
    )
    calls = custom_calls(cuda_text(gradient, struct(M, K), struct(K, N)))
    modes = [config["mode"] for target, config, _ in calls if target == extension.QUANTIZE_TARGET]
    # Only gradients are wanted: the forward product goes, and what only it reads.
    assert modes == [MODE["column"], MODE["block"], MODE["row_column"]]
    gemms = [config for target, config, _ in calls if target == extension.GEMM_TARGET]
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


@pytest.mark.parametrize("k, n, padded", [(1003, 129, (1024, 136)), (2880, 2112, (2944, 2112))])
def test_ragged_k_is_padded_where_it_is_quantised_and_n_in_the_result(k, n, padded):
    text = cuda_text(matmul, struct(65, k), struct(k, n))
    calls = custom_calls(text)
    assert [config["padded"] for _, config, _ in calls[:-1]] == [1, 1]
    line = calls[-1][2]
    assert f"tensor<65x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<{n}x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<65x{padded[1]}xbf16>" in line
    assert "stablehlo.pad" not in text


@pytest.mark.parametrize("k, n, padded", [(1003, 129, (1008, 136)), (2880, 2112, (2880, 2112))])
def test_quantised_operands_are_padded_to_what_the_kernel_takes(k, n, padded):
    multiply = lambda x, w: scaled_matmul(quantize(x), quantize(w, block=(128, 128)))
    calls = custom_calls(cuda_text(multiply, struct(65, k), struct(n, k)))
    line = calls[-1][2]
    assert f"tensor<65x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<{n}x{padded[0]}xf8E4M3FN>" in line
    assert f"tensor<65x{padded[1]}xbf16>" in line


@pytest.mark.parametrize("m, n, k", [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_empty_extents_call_no_kernel(m, n, k):
    text = cuda_text(matmul, struct(m, k), struct(k, n))
    assert extension.GEMM_TARGET not in text


def test_xla_implementation_calls_no_kernel():
    text = cuda_text(functools.partial(matmul, implementation="xla"), struct(M, K), struct(K, N))
    assert custom_calls(text) == []


@pytest.mark.parametrize("batched", ["lhs", "rhs"])
def test_vmap_of_one_operand_is_one_product(batched):
    in_axes = (0, None) if batched == "lhs" else (None, 0)
    args = [struct(*((3,) if d == 0 else ()), *s) for d, s in zip(in_axes, [(M, K), (K, N)])]  # noqa: B905
    calls = custom_calls(cuda_text(jax.vmap(matmul, in_axes), *args))
    assert [target for target, *_ in calls].count(extension.GEMM_TARGET) == 1


def test_export_for_cuda_from_any_machine():
    export = functools.partial(jax.export.export, platforms=("cuda",))
    args = struct(M, K), struct(K, N)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility"):
        export(jax.jit(matmul))(*args)
    exported = export(jax.jit(matmul), disabled_checks=EXPORT_CHECKS)(*args)
    assert len(custom_calls(exported.mlir_module())) == 3
    jax.export.deserialize(exported.serialize())


def test_export_for_cuda_of_all_kernels():
    layer = functools.partial(moe_layer, top_k=2)
    gradients = jax.grad(lambda *x: layer(*x).astype(jnp.float32).sum(), (0, 2, 3))
    args = struct(8, 128), struct(8, 4), struct(4, 128, 256), struct(4, 128, 128)
    exported = jax.export.export(
        jax.jit(gradients), platforms=("cuda",), disabled_checks=EXPORT_CHECKS
    )(*args)
    text = exported.mlir_module()
    for target in (extension.GROUPED_WGRAD_TARGET, extension.SWIGLU_GRAD_QUANTIZE_TARGET):
        assert target in text


@pytest.mark.parametrize("live", [(), ([True] * 4,)], ids=["jax 0.11", "jax 0.12"])
def test_unused_products_are_dropped_however_jax_asks(live):
    lhs, rhs = quantize(jnp.ones((M, K))), quantize(jnp.ones((N, K)), block=(128, 128))
    function = functools.partial(scaled_matmul, implementation="xla")
    equations = jax.make_jaxpr(function)(lhs, rhs).jaxpr.eqns
    (gemm,) = (e for e in equations if "gemm" in e.primitive.name)
    rule = partial_eval.dce_rules[gemm.primitive]
    assert rule([False], *live, gemm) == ([False] * 4, None)
    assert rule([True], *live, gemm) == ([True] * 4, gemm)


@on_cpu
def test_cuda_implementation_raises_on_cpu():
    with raises_without_kernel("quantize"):
        quantize(jnp.ones((2, 2)), implementation="cuda")
    with raises_without_kernel("quantize"):
        jax.jit(lambda x: matmul(x, x, implementation="cuda"))(jnp.ones((3, 3)))


@on_cpu
def test_fallback_warns_once_and_says_why():
    extension.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(jnp.ones((2, 33)))
        matmul(jnp.ones((2, 34)), jnp.ones((34, 3)))
    ours = [w for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(ours) == 1
    assert "lowering for cpu, not for an NVIDIA GPU" in str(ours[0].message)


@on_cpu
@pytest.mark.parametrize(
    "size, call",
    [  # sizes of their own: a program that was lowered before does not warn
        (41, lambda x: matmul(x, x)),
        (42, lambda x: jax.jit(matmul)(x, x)),
        (43, lambda x: jax.grad(lambda x: matmul(x, x).sum())(x)),
        (44, lambda x: jax.vmap(lambda x: matmul(x, x))(x[None])),
        (45, lambda x: jax.jit(matmul).lower(x, x)),
    ],
    ids=["eager", "jit", "grad", "vmap", "lower"],
)
def test_fallback_warning_points_at_the_line_of_the_caller(size, call):
    extension.warn_once.cache_clear()
    with pytest.warns(FallbackWarning) as caught:
        call(jnp.ones((size, size)))
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno)


@on_cpu
def test_asking_for_the_reference_does_not_warn():
    extension.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul(jnp.ones((2, 35)), jnp.ones((35, 3)), implementation="xla")


def test_gpu_without_the_kernels_falls_back_when_lowering(monkeypatch):
    monkeypatch.setattr(fallback, "_has_gpu", lambda: True)
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "needs an sm90a device; got A100")
    extension.warn_once.cache_clear()
    with pytest.warns(FallbackWarning, match="needs an sm90a device; got A100"):
        assert custom_calls(cuda_text(quantize, struct(3, 77))) == []
    with raises(RuntimeError, match="implementation='cuda' must be .*; got: needs an sm90a"):
        cuda_text(functools.partial(quantize, implementation="cuda"), struct(3, 77))
