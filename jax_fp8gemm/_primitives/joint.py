"""define_joint_primitive: makes a primitive whose kernel does what several primitives do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType

import jax
from jax.interpreters import mlir

from jax_fp8gemm._primitives import fallback
from jax_fp8gemm._primitives.batch import bind_each
from jax_fp8gemm._primitives.define import make_primitive
from jax_fp8gemm._primitives.rules import (
    NEEDS_DEVICES,
    PLAIN,
    Arrays,
    Forms,
    Rules,
    without_twins,
)
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle

# By the name of a primitive: the function that binds the primitives in whose place it stands.
APART: dict[str, Callable[..., Arrays]] = {}


def define_joint_primitive(
    name: str,
    shape_rule: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    ffi_call: Callable[..., Arrays],
    apart: Callable[..., Arrays],
    *,
    batches_apart: bool = False,
) -> Callable[..., Arrays]:
    """Makes a primitive that stands for several ones, and returns the function that binds it.

    The kernel runs in a program of one device, and on the shards of a shard_map. Everywhere else
    `apart` takes its place: without an NVIDIA GPU, with an implementation in plain JAX, and where
    jit divides the operands over a mesh, which divides each primitive in its own way.

    Args:
      name, shape_rule: as for define_primitive.
      ffi_call: (*operands, **params) -> the results, by the kernel.
      apart: (*operands, twins, implementation, **params) -> the same bits, by the primitives.
      batches_apart: whether jax.vmap maps these. Otherwise the kernel runs for one batch element
        after another.
    Returns:
      bind(*operands, twins, implementation, **params) -> a list of results. twins: as for what
      define_primitive returns.
    """
    rules = Rules(name, shape_rule, Forms(apart, ffi_call), None, None)

    def run_apart(*operands, twin_of=(), **params):
        own = without_twins(operands, twin_of)
        twins = dict(zip(twin_of, operands[len(own) :], strict=True))
        return apart(*own, twins=twins, **params)

    APART[name] = run_apart

    def bind(*operands, twins=MappingProxyType({}), **params):
        operands = match_varying(*(settle(rules.op, x) for x in operands))
        if any(jax.typeof(x).sharding.mesh.manual_axes for x in operands):
            return on_shards.bind(*(replicate(rules.op, x) for x in operands), **params)
        arrays = *operands, *(settle(rules.op, x) for x in twins.values())
        twin_of = dict(twin_of=tuple(twins)) if twins else {}
        run = run_apart if explicit_mesh(operands) is not None else on_arrays.bind
        return run(*arrays, **twin_of, **params)

    def batch(operands, dims, twin_of=(), **params):
        operands, dims = (without_twins(xs, twin_of) for xs in (operands, dims))
        if batches_apart:
            results = jax.vmap(partial(apart, **params), in_axes=tuple(dims))(*operands)
            return results, [0] * len(results)
        results = bind_each(bind, [replicate(rules.op, x) for x in operands], dims, **params)
        return results, [0] * len(results)

    def lower_apart(ctx, *operands, **params):
        return mlir.lower_fun(partial(run_apart, **params), multiple_results=True)(ctx, *operands)

    def lower_cuda(is_shard: bool, ctx, *operands, implementation, twin_of=(), **params):
        num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
        is_whole = is_shard or num_devices == 1
        if implementation in PLAIN or not is_whole or fallback.unusable_reason() is not None:
            how = dict(implementation=implementation, twin_of=twin_of)
            return lower_apart(ctx, *operands, **how, **params)
        run = lambda *xs: rules.kernel(*without_twins(xs, twin_of), **params)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)

    on_shards, on_arrays = (
        make_primitive(rules, lower_apart, partial(lower_cuda, is_shard), batch)
        for is_shard in (True, False)
    )
    if NEEDS_DEVICES is not None:
        NEEDS_DEVICES.add(on_arrays)
    return bind
