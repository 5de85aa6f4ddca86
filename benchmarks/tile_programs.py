"""Kernels, programs and operands of a dense 1d2d product with given tile configs."""

import concurrent.futures
import functools
import math
import multiprocessing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.case import tile_text
from benchmarks.problem import Shape
from benchmarks.tile_candidates import candidates
from jax_fp8gemm._runtime import extension, precompile
from jax_fp8gemm._tuning.tile import Kernel, TileConfig

KERNEL = Kernel(
    is_1d1d=False, lhs_e5m2=False, rhs_e5m2=False, out_f32=False, accumulate=False, num_sms=132
)
_DRAWN = (1 << 22) + 1
_MOST_VALUES = 1 << 28  # of an operand


def compile_kernels(configs: Sequence[TileConfig], kernel: Kernel, jobs: int) -> list[str]:
    """Compiles the kernels in processes. Returns what is wrong with some of them."""
    spawn = multiprocessing.get_context("spawn")
    compile_one = functools.partial(_compile_kernel, kernel)
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        return [reason for reason in pool.map(compile_one, configs) if reason]


def _compile_kernel(kernel: Kernel, config: TileConfig) -> str:
    try:
        report = precompile.compile_gemm(config.attributes(**kernel))
    except (ValueError, RuntimeError) as error:
        return f"{tile_text(config)}: {error}"
    return f"{report.name}: spills" if report.spill_bytes or report.warnings else ""


def programs_of(shape: Shape, threads: concurrent.futures.Executor) -> dict[TileConfig, Any]:
    """Lowers the product with each config, and compiles it in a thread.

    It calls the kernel without the primitive, whose lowering takes several times longer.
    """
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in _operand_types(shape)]
    row_major, column_major = (0, 1), (1, 0)
    futures = {}
    for config in candidates(shape.m, shape.k):
        multiply = jax.ffi.ffi_call(
            extension.GEMM_TARGET,
            jax.ShapeDtypeStruct((shape.m, shape.n or 0), jnp.bfloat16),
            input_layouts=[row_major, column_major, row_major, row_major],
            output_layouts=row_major,
        )
        attributes = config.attributes(**KERNEL)

        # lhs_scale is (k / 128, m), as the kernel reads it.
        def run(lhs, lhs_scale, rhs, rhs_scale, multiply=multiply, attributes=attributes):
            return multiply(lhs, lhs_scale.T, rhs, rhs_scale, config=attributes)

        futures[config] = threads.submit(jax.jit(run).lower(*operands).compile)
    return futures


def _operand_types(shape: Shape) -> list[tuple[tuple[int, ...], Any]]:
    m, n, k = shape.m, shape.n or 0, shape.k
    kb = -(-k // 128)
    values, scale = ml_dtypes.float8_e4m3fn, np.float32
    return [((m, k), values), ((kb, m), scale), ((n, k), values), ((-(-n // 128), kb), scale)]


def draw_values() -> tuple[np.ndarray, np.ndarray]:
    """As many e4m3 values as an operand may have, and scales. Few are drawn."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(_DRAWN, np.float32) * 100).clip(-448, 448)
    values = values.astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.005, 0.02, _DRAWN).astype(np.float32)
    return np.resize(values, _MOST_VALUES), np.resize(scales, _MOST_VALUES // 128)


def operands_of(shape: Shape, pools: tuple[np.ndarray, np.ndarray]) -> list[jax.Array]:
    pool_of = {pool.dtype: pool for pool in pools}
    types = [(dims, pool_of[np.dtype(dtype)]) for dims, dtype in _operand_types(shape)]
    return [jax.device_put(pool[: math.prod(dims)].reshape(dims)) for dims, pool in types]
