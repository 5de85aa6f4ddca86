"""The families `dense`, `wgrad` and `quantize`: our call, its work and its peers, row by row."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

import jax_fp8gemm
from jax_fp8gemm import _ffi, _tile_config
from jax_fp8gemm.bench._data import normal
from jax_fp8gemm.bench._peers import peer_calls
from jax_fp8gemm.bench._problem import Shape, Work, gemm_work, quantize_work
from jax_fp8gemm.bench._timer import Call, jax_queue

Build = Callable[[], Call]
GEMM_KERNEL, QUANTIZE_KERNEL = "fp8_gemm", "quantize"  # substrings of our kernels' names


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure. `build` makes our call; `peers` makes the others', by name."""

    labels: Mapping[str, Any]
    shape: Shape
    work: Work
    config: str
    build: Build
    peers: Mapping[str, Build]


def cases(family: str, shapes: Sequence[Shape]) -> list[Case]:
    """The rows of a family; `wgrad` and `quantize` measure each shape in several ways."""
    if family == "dense":
        return [_dense(shape) for shape in shapes]
    if family == "wgrad":
        return [_wgrad(shape, accumulate) for shape in shapes for accumulate in (True, False)]
    return [_quantize(shape, mode) for mode in _QUANTIZERS for shape in shapes]


def _dense(shape: Shape) -> Case:
    def build() -> Call:
        lhs = quantize_rows(normal(shape.m, shape.k, seed=0))
        rhs = _blocks(normal(shape.n or 0, shape.k, seed=1))
        multiply = jax.jit(functools.partial(jax_fp8gemm.scaled_matmul, out_dtype=jnp.bfloat16))
        return Call(lambda: multiply(lhs, rhs), jax_queue(), GEMM_KERNEL)

    work = gemm_work(shape, is_1d1d=False, out_bytes=2, accumulate=False)
    config = _config_text(shape, is_1d1d=False, out_f32=False, accumulate=False)
    return Case(_labels(shape), shape, work, config, build, peer_calls(shape, is_1d1d=False))


def _wgrad(shape: Shape, accumulate: bool) -> Case:
    """lhs^T x dout over tokens (k), both stored token-minor with 1x128 scales, f32 result."""

    def build() -> Call:
        lhs = quantize_rows(normal(shape.m, shape.k, seed=0))
        rhs = quantize_rows(normal(shape.n or 0, shape.k, seed=1))
        multiply = functools.partial(jax_fp8gemm.scaled_matmul, out_dtype=jnp.float32)
        if not accumulate:
            plain = jax.jit(multiply)
            return Call(lambda: plain(lhs, rhs), jax_queue(), GEMM_KERNEL)
        add = jax.jit(lambda a, b, c: multiply(a, b, accumulate_into=c), donate_argnums=2)
        total = [jnp.zeros((shape.m, shape.n or 0), jnp.float32)]

        def run() -> jax.Array:
            total[0] = add(lhs, rhs, total[0])
            return total[0]

        return Call(run, jax_queue(), GEMM_KERNEL)

    work = gemm_work(shape, is_1d1d=True, out_bytes=4, accumulate=accumulate)
    config = _config_text(shape, is_1d1d=True, out_f32=True, accumulate=accumulate)
    labels = _labels(shape) | {"accumulate": accumulate}
    return Case(labels, shape, work, config, build, peer_calls(shape, is_1d1d=True))


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

    return Case(
        labels={"m": m, "n": None, "k": k, "mode": mode},
        shape=shape,
        work=quantize_work(shape, num_results, counted),
        config="",
        build=build,
        peers={"xla": functools.partial(build, "xla", "")},
    )


_QUANTIZERS: dict[str, Callable[..., Any]] = {
    "rows": functools.partial(jax_fp8gemm.quantize, block=(1, 128)),
    "columns": functools.partial(jax_fp8gemm.quantize, block=(1, 128), axis=-2),
    "rows+columns": jax_fp8gemm.quantize_both,
    "blocks": functools.partial(jax_fp8gemm.quantize, block=(128, 128)),
    "blocks+transposed": functools.partial(
        jax_fp8gemm.quantize, block=(128, 128), with_transpose=True
    ),
}


def quantize_rows(x: jax.Array) -> jax_fp8gemm.ScaledArray:
    """Quantised, its scale laid out as the kernel reads it: XLA then adds no copy to the call."""
    quantized = _quantize_rows(x)
    rows_minor = Format(Layout(major_to_minor=(1, 0)), quantized.scale.sharding)
    scale = jax.device_put(quantized.scale, rows_minor)
    return jax_fp8gemm.ScaledArray(quantized.values, scale)


_Quantizer = Callable[[jax.Array], jax_fp8gemm.ScaledArray]
_quantize_rows: _Quantizer = jax.jit(functools.partial(jax_fp8gemm.quantize, block=(1, 128)))
_blocks: _Quantizer = jax.jit(functools.partial(jax_fp8gemm.quantize, block=(128, 128)))


def _labels(shape: Shape) -> dict[str, Any]:
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _config_text(shape: Shape, **how: bool) -> str:
    c = _tile_config.choose(shape.m, shape.n or 0, shape.k, num_sms=_ffi.num_sms(), **how)
    return tile_text(c)


def tile_text(c: _tile_config.TileConfig) -> str:
    """The tile config in short; docs/benchmarks.md says how to read it."""
    return (
        f"{c.block_m}x{c.block_n}/{c.sub_n} w{c.num_consumers} a{c.num_accums} s{c.num_stages} "
        f"d{c.num_slabs} c{c.cluster_m}x{c.cluster_n}"
    )
