"""The families `ragged`, `masked` and `ragged_wgrad`: products of groups, quantised before."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8gemm
from benchmarks.case import Case, gemm_call, tile_text
from benchmarks.data import (
    normal,
    normal_groups,
    quantize_blocks,
    quantize_rows,
    with_rows_minor,
)
from benchmarks.families.grouped_problem import (
    draw_sizes,
    expected_rows,
    masked_rows,
    ragged_work,
    sizes_of,
    wgrad_work,
)
from benchmarks.peers.grouped import masked_peers, ragged_peers, wgrad_peers
from benchmarks.problem import GroupedShape
from benchmarks.timing.timer import Call
from jax_fp8gemm import ScaledArray
from jax_fp8gemm._data import groups as _groups
from jax_fp8gemm._primitives.grouped_gemm import UnusedRows
from jax_fp8gemm._runtime import extension
from jax_fp8gemm._tuning import choose, tile_config

_BLOCK = 128
_ragged_dot = functools.partial(jax_fp8gemm.scaled_ragged_dot, out_dtype=jnp.bfloat16)
_quantize_ragged = jax.jit(jax_fp8gemm.quantize_ragged)


def grouped_cases(family: str, shapes: Sequence[GroupedShape]) -> list[Case]:
    """The rows of a family; `ragged_wgrad` measures each shape with and without accumulation."""
    if family == "ragged":
        return [_ragged(shape) for shape in shapes]
    if family == "masked":
        return [_masked(shape) for shape in shapes]
    return [_wgrad(shape, accumulate) for shape in shapes for accumulate in (True, False)]


def _ragged(shape: GroupedShape) -> Case:
    sizes = sizes_of(shape)
    shape = dataclasses.replace(shape, groups=len(sizes))
    rows, n, k = int(sizes.sum()), shape.n or 0, shape.k

    def build() -> Call:
        lhs = quantize_rows(normal(rows, k, seed=0))
        return gemm_call(_ragged_dot, (lhs, _weights(shape), jnp.asarray(sizes)))

    labels = dict(groups=shape.groups, expected_rows=shape.m, rows=rows, n=n, k=k)
    if shape.sizes or shape.empty:
        labels |= dict(sizes=shape.sizes or "even", empty=shape.empty)
    return Case(
        labels=labels,
        shape=shape,
        work=ragged_work(shape, rows, int(np.count_nonzero(sizes))),
        config=_config_text(rows, n, k, shape.groups),
        build=build,
        peers=ragged_peers(shape, sizes),
        tiles=tile_config.GROUPED_CONFIGS[tile_config.GROUPED_ROWS],
    )


def _masked(shape: GroupedShape) -> Case:
    sizes, max_m = sizes_of(shape), masked_rows(shape.m)
    rows, n, k = int(sizes.sum()), shape.n or 0, shape.k
    expected = expected_rows(shape.m)

    def build(unused_rows: UnusedRows = "zero") -> Call:
        lhs = normal(shape.groups * max_m, k, seed=0).reshape(shape.groups, max_m, k)
        operands = (quantize_rows(lhs), _weights(shape), jnp.asarray(sizes))
        how = dict(unused_rows=unused_rows, expected_rows=expected)
        return gemm_call(functools.partial(_ragged_dot, **how), operands)

    undefined = functools.partial(build, "undefined")

    labels = dict(groups=shape.groups, expected_rows=shape.m, max_m=max_m, rows=rows, n=n, k=k)
    return Case(
        labels=labels,
        shape=shape,
        work=ragged_work(shape, rows),
        config=_config_text(shape.groups * min(expected, max_m), n, k, shape.groups),
        build=build,
        peers={"unused_undefined": undefined} | masked_peers(shape, sizes, max_m),
        tiles=tile_config.GROUPED_CONFIGS[tile_config.GROUPED_ROWS],
    )


def _wgrad(shape: GroupedShape, accumulate: bool) -> Case:
    """lhs^T x dout over the tokens of each group, f32 result; k is the tokens of all groups."""
    sizes = draw_sizes(shape.groups, shape.k, multiple=_BLOCK)
    groups, m, n, tokens = shape.groups, shape.m, shape.n or 0, int(sizes.sum())

    def build() -> Call:
        lhs, rhs = _columns(tokens, m, sizes, seed=0), _columns(tokens, n, sizes, seed=1)
        multiply = functools.partial(jax_fp8gemm.scaled_ragged_wgrad, out_dtype=jnp.float32)
        total = jnp.zeros((groups, m, n), jnp.float32) if accumulate else None
        return gemm_call(multiply, (lhs, rhs, jnp.asarray(sizes)), total)

    extent = _groups.ragged_extent(tokens, groups)  # what the operands have for any sizes
    return Case(
        labels=dict(groups=groups, m=m, n=n, expected_k=shape.k, k=tokens, accumulate=accumulate),
        shape=shape,
        work=wgrad_work(shape, tokens, accumulate),
        config=_config_text(m, n, extent, groups, is_1d1d=True, accumulate=accumulate),
        build=build,
        peers=wgrad_peers(shape, sizes, accumulate),
        tiles=tile_config.configs(tile_config.GROUPED_CONTRACTION, is_1d1d=True),
    )


def _weights(shape: GroupedShape) -> ScaledArray:
    return quantize_blocks(normal_groups(shape.groups, shape.n or 0, shape.k, seed=1))


def _columns(tokens: int, columns: int, sizes: np.ndarray, seed: int) -> ScaledArray:
    x = normal(tokens, columns, seed=seed)
    return with_rows_minor(_quantize_ragged(x, jnp.asarray(sizes)))


def _config_text(
    m: int, n: int, k: int, groups: int, is_1d1d: bool = False, accumulate: bool = False
) -> str:
    how = dict(is_1d1d=is_1d1d, out_f32=is_1d1d, accumulate=accumulate)
    c = choose.choose(m, n, k, groups, num_sms=extension.num_sms(), **how)
    return tile_text(c)
