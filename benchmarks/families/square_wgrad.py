"""The families `wgrad-square` and `ragged-wgrad-square`: weight gradients whose lhs has 128x128
blocks, beside our own product of 1x128 blocks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Case, gemm_call, tile_text
from benchmarks.data import normal, quantize_blocks, quantize_rows
from benchmarks.families.grouped_problem import draw_sizes, wgrad_work
from benchmarks.problem import GroupedShape, Shape, Work
from benchmarks.timing.timer import Call
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._primitives.gemm import gemm
from jax_fp8gemm._primitives.grouped_wgrad import grouped_wgrad
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import choose, tile_config

_BLOCK = 128
_HOW = dict(is_1d1d=False, transpose_out=True)


def square_wgrad_cases(shapes: Sequence[Shape]) -> list[Case]:
    """The rows of either family: each shape with and without accumulation."""
    return [_case(shape, accumulate) for shape in shapes for accumulate in (True, False)]


def _case(shape: Shape, accumulate: bool) -> Case:
    build = functools.partial(_build, shape, accumulate)
    n, how = shape.n or 0, dict(**_HOW, out_f32=True, accumulate=accumulate)
    num_sms = extension.num_sms()
    # The kernel computes the transpose.
    if isinstance(shape, GroupedShape):
        sizes = _sizes(shape)
        tokens, grouping = int(sizes.sum()), tile_config.GROUPED_CONTRACTION
        labels: dict[str, Any] = dict(groups=shape.groups, m=shape.m, n=n, expected_k=shape.k)
        extents = n, shape.m, _groups.ragged_extent(tokens, shape.groups), shape.groups
        config = choose.choose(*extents, num_sms=num_sms, **how)
        work = wgrad_work(shape, tokens, accumulate)
    else:
        tokens, grouping = shape.k, 0
        labels = dict(m=shape.m, n=n)
        config = choose.choose(n, shape.m, tokens, num_sms=num_sms, **how)
        work = _work(shape, accumulate)
    return Case(
        labels=labels | dict(k=tokens, accumulate=accumulate),
        shape=shape,
        work=work,
        config=tile_text(config),
        build=lambda: build(is_square=True),
        peers={"1d1d": lambda: build(is_square=False)},
        tiles=tile_config.configs(grouping, **_HOW),
    )


def _sizes(shape: GroupedShape) -> np.ndarray:
    return draw_sizes(shape.groups, shape.k, multiple=_BLOCK)


def _work(shape: Shape, accumulate: bool) -> Work:
    """FP8 operands, f32 scales (128x128 on lhs, 1x128 on rhs), an f32 result."""
    m, n, k = shape.m, shape.n or 0, shape.k
    num_scales = (n + -(-m // _BLOCK)) * -(-k // _BLOCK)
    out_bytes = 4 * m * n * (2 if accumulate else 1)
    return Work(2 * m * n * k, (m + n) * k + 4 * num_scales + out_bytes)


def _build(shape: Shape, accumulate: bool, is_square: bool) -> Call:
    """Operands (m, tokens) and (n, tokens), token-minor; groups have whole blocks of tokens."""
    quantize_lhs = quantize_blocks if is_square else quantize_rows
    tokens, out_shape, sizes = shape.k, (shape.m, shape.n or 0), ()
    if isinstance(shape, GroupedShape):
        group_sizes = _sizes(shape)
        tokens = _groups.ragged_extent(int(group_sizes.sum()), shape.groups)
        out_shape = shape.groups, *out_shape
        sizes = (jnp.asarray(group_sizes),)
    lhs = quantize_lhs(normal(shape.m, tokens, seed=0))
    rhs = quantize_rows(normal(shape.n or 0, tokens, seed=1))
    total = jnp.zeros(out_shape, jnp.float32) if accumulate else None
    return gemm_call(_multiply, (lhs, rhs, *sizes), total)


def _multiply(lhs: Any, rhs: Any, *sizes: jax.Array, accumulate_into: Any = None) -> jax.Array:
    product: Any = grouped_wgrad if sizes else gemm
    return product(lhs, rhs, *sizes, jnp.float32, accum=accumulate_into)
