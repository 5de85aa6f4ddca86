"""The families `dense`, `wgrad` and `quantize`: our call, its work and its peers, row by row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp8gemm
from benchmarks.case import Case, gemm_call, tile_text
from benchmarks.data import normal, quantize_blocks, quantize_rows
from benchmarks.peers.dense import peer_calls
from benchmarks.problem import Shape, gemm_work, quantize_work
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call
from jax_fp8gemm._data.split_k import count_parts
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import choose, tile_config

QUANTIZE_KERNEL = "quantize"  # substring of the names of our quantise kernels


def cases(family: str, shapes: Sequence[Shape]) -> list[Case]:
    """The rows of a family; `wgrad` and `quantize` measure each shape in several ways."""
    if family == "dense":
        return [_dense(shape) for shape in shapes]
    if family == "wgrad":
        return [_wgrad(shape, accumulate) for shape in shapes for accumulate in (True, False)]
    return [_quantize(shape, mode) for mode in _QUANTIZERS for shape in shapes]


def _dense(shape: Shape) -> Case:
    def build(**how: bool) -> Call:
        lhs = quantize_rows(normal(shape.m, shape.k, seed=0))
        rhs = quantize_blocks(normal(shape.n or 0, shape.k, seed=1))
        multiply = functools.partial(jax_fp8gemm.scaled_matmul, out_dtype=jnp.bfloat16, **how)
        return gemm_call(multiply, (lhs, rhs))

    work = gemm_work(shape, is_1d1d=False, out_bytes=2, accumulate=False)
    config = _config_text(shape, is_1d1d=False, out_f32=False, accumulate=False)
    peers = peer_calls(shape, is_1d1d=False)
    if count_parts(shape.m, shape.n, -(-shape.k // 128)) > 1:
        peers = {"split_k": functools.partial(build, split_k=True), **peers}
    tiles = tile_config.configs(is_1d1d=False, with_clusters=True)
    return Case(_labels(shape), shape, work, config, build, peers, tiles=tiles)


def _wgrad(shape: Shape, accumulate: bool) -> Case:
    """lhs^T x dout over tokens (k), both stored token-minor with 1x128 scales, f32 result."""

    def build() -> Call:
        lhs = quantize_rows(normal(shape.m, shape.k, seed=0))
        rhs = quantize_rows(normal(shape.n or 0, shape.k, seed=1))
        multiply = functools.partial(jax_fp8gemm.scaled_matmul, out_dtype=jnp.float32)
        total = jnp.zeros((shape.m, shape.n or 0), jnp.float32) if accumulate else None
        return gemm_call(multiply, (lhs, rhs), total)

    work = gemm_work(shape, is_1d1d=True, out_bytes=4, accumulate=accumulate)
    config = _config_text(shape, is_1d1d=True, out_f32=True, accumulate=accumulate)
    labels = _labels(shape) | {"accumulate": accumulate}
    peers = peer_calls(shape, is_1d1d=True, accumulate=accumulate)
    tiles = tile_config.configs(is_1d1d=True, with_clusters=True)
    return Case(labels, shape, work, config, build, peers, tiles=tiles)


def _quantize(shape: Shape, mode: str) -> Case:
    quantizer = _QUANTIZERS[mode]
    m, k = shape.m, shape.k
    mb, kb = -(-m // 128), -(-k // 128)
    scales = {"rows": m * kb, "columns": k * mb, "blocks": mb * kb}
    num_results = 2 if "+" in mode else 1
    counted = [scales[name] for name in mode.split("+") if name in scales]

    def build(implementation: str | None = None, kernel: str = QUANTIZE_KERNEL) -> Call:
        x = normal(m, k, seed=0)
        run = jax.jit(functools.partial(quantizer, implementation=implementation))
        return Call(lambda: run(x), jax_queue(), kernel)

    work = quantize_work(shape, num_results, counted)
    return Case(
        labels={"m": m, "n": None, "k": k, "mode": mode},
        shape=shape,
        work=work,
        config="",
        build=build,
        peers={
            "copy": functools.partial(_copy, work.num_bytes),
            "xla": functools.partial(build, "xla", ""),
        },
    )


def _copy(num_bytes: int) -> Call:
    """A copy within the device that reads and writes num_bytes together."""
    source, copy = normal(1, num_bytes // 4, seed=0), jax.jit(jnp.copy)
    return Call(lambda: copy(source), jax_queue())


_QUANTIZERS: dict[str, Callable[..., Any]] = {
    "rows": functools.partial(jax_fp8gemm.quantize, block=(1, 128)),
    "columns": functools.partial(jax_fp8gemm.quantize, block=(1, 128), axis=-2),
    "rows+columns": jax_fp8gemm.quantize_both,
    "blocks": functools.partial(jax_fp8gemm.quantize, block=(128, 128)),
    "blocks+transposed": functools.partial(
        jax_fp8gemm.quantize, block=(128, 128), with_transpose=True
    ),
}


def _labels(shape: Shape) -> dict[str, Any]:
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _config_text(shape: Shape, **how: bool) -> str:
    c = choose.choose(shape.m, shape.n or 0, shape.k, num_sms=extension.num_sms(), **how)
    return tile_text(c)
