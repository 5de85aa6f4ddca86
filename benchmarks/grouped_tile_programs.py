"""Programs and operands of a product of groups of rows with given tile configs."""

import concurrent.futures
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.families.grouped_problem import sizes_of
from benchmarks.problem import GroupedShape
from benchmarks.tile_candidates import grouped_candidates
from benchmarks.tile_programs import KERNEL as DENSE_KERNEL
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning.tile import Kernel, TileConfig
from jax_fp8gemm._tuning.tile_config import GROUPED_ROWS

KERNEL: Kernel = {**DENSE_KERNEL, "grouping": GROUPED_ROWS}


def grouped_programs_of(
    shape: GroupedShape, threads: concurrent.futures.Executor
) -> dict[TileConfig, Any]:
    """Lowers the product with each config, and compiles it in a thread.

    It calls the kernel without the primitive, whose lowering takes several times longer.
    """
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in _operand_types(shape)]
    m, n = operands[0].shape[0], shape.n or 0
    row_major, column_major, vector = (0, 1), (1, 0), (0,)
    futures = {}
    for config in grouped_candidates(shape.m):
        multiply = jax.ffi.ffi_call(
            extension.GROUPED_GEMM_TARGET,
            (jax.ShapeDtypeStruct((m, n), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)),
            input_layouts=[row_major, column_major, row_major, row_major, vector, vector],
            output_layouts=[row_major, vector],
        )
        attributes = config.attributes(**KERNEL)

        # lhs_scale is (k / 128, m), as the kernel reads it.
        def run(lhs, lhs_scale, *others, multiply=multiply, attributes=attributes):
            how = dict(config=attributes, rows_per_group=np.int32(0), clears_unused=np.int32(1))
            return multiply(lhs, lhs_scale.T, *others, jnp.zeros(1, jnp.int32), **how)[0]

        futures[config] = threads.submit(jax.jit(run).lower(*operands).compile)
    return futures


def _operand_types(shape: GroupedShape) -> list[tuple[tuple[int, ...], Any]]:
    sizes = sizes_of(shape)
    m, n, k = int(sizes.sum()), shape.n or 0, shape.k
    groups, blocks, kb = len(sizes), -(-n // 128), -(-k // 128)
    values, scale = ml_dtypes.float8_e4m3fn, np.float32
    types: list[tuple[tuple[int, ...], Any]] = [((m, k), values), ((kb, m), scale)]
    types += [((groups * n, k), values), ((groups * blocks, kb), scale)]
    return [*types, ((groups,), np.int32)]


def grouped_operands_of(
    shape: GroupedShape, pools: tuple[np.ndarray, np.ndarray]
) -> list[jax.Array]:
    pool_of = {pool.dtype: pool for pool in pools}

    def draw(dims: tuple[int, ...], dtype: Any) -> np.ndarray:
        pool, num = pool_of[np.dtype(dtype)], math.prod(dims)
        return (pool[:num] if num <= pool.size else np.resize(pool, num)).reshape(dims)

    *types, _ = _operand_types(shape)
    return [*(jax.device_put(draw(*of)) for of in types), jax.device_put(sizes_of(shape))]


def groups_labels(shape: GroupedShape) -> dict[str, Any]:
    """The labels of a row, from which its sizes follow."""
    rows, full = int(sizes_of(shape).sum()), shape.groups
    labels: dict[str, Any] = dict(groups=full + shape.empty, expected_rows=shape.m, rows=rows)
    return labels | dict(n=shape.n, k=shape.k, sizes=shape.sizes or "even", empty=shape.empty)
