"""define_primitive: makes a JAX primitive of an op's rules.

The rules are the shape rule, the reference, the FFI call, the batch rule and the partition rule.
The reference defines what the op computes. It also runs wherever the kernel cannot: on CPU, on
other GPUs, and with implementation="xla". The emulation, in plain JAX too, has the bits of the
kernel, and runs with implementation="emulate" alone. The choice is made when a program is lowered,
so an executable always runs the same code.

Each module of this folder that calls define_primitive has its sections in the order of the
arguments of define_primitive. In front of them stands the unchecked function that binds the
primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla

from jax_fp8gemm._primitives.batch import bind_each
from jax_fp8gemm._primitives.rules import (
    NEEDS_DEVICES,
    Arrays,
    Forms,
    MeshRules,
    Rules,
    without_twins,
)
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh, reshard, result_specs, with_auto_axes
from jax_fp8gemm._sharding.manual_axes import (
    axes_of_batch,
    cut_batch,
    match_varying,
    replicate,
    settle,
)

__all__ = ["Arrays", "Forms", "MeshRules", "define_primitive"]


def define_primitive(
    name: str,
    shape_rule: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    forms: Forms,
    *,
    batch_rule: Callable[..., tuple[Arrays, Sequence[int]]] | None = None,
    dce_rule: Callable[..., tuple[dict[str, Any], Sequence[int]]] | None = None,
    mesh_rules: MeshRules | None = None,
) -> Callable[..., Arrays]:
    """Makes a primitive and returns the function that binds it.

    Args:
      name: the name of the primitive, `jax_fp8gemm_<op>`. Errors start with `<op>`.
      shape_rule: (*avals, **params) -> the types of the results. Raises on bad operands.
      forms: what the op computes, in each of its implementations.
      batch_rule: (operands, batch dims, **params) -> (results, their batch dims). It binds the
        primitive again. None: the op runs for one batch element after another.
      dce_rule: (which results are used, **params) -> (new params, indices of the old results that
        the equation then has). The new equation must compute the used results.
      mesh_rules: how a mesh divides the op. None: the compiler gathers sharded operands.
    Returns:
      bind(*operands, implementation, out_specs=None, twins={}, **params) -> a list of results.
      out_specs holds a PartitionSpec for each result and says how Explicit mesh axes cut it. None:
      the partition rule derives them from the operands; without rules the results are replicated.
      In a shard_map all operands get the union of their varying manual axes. twins holds, by the
      index of an operand, the same array with its last two dimensions swapped, which a mesh moves
      in its place (_sharding/twins.py). A shard_map and jax.vmap leave the twins out.
    """
    rules = Rules(name, shape_rule, forms, dce_rule, mesh_rules)

    def bind(*operands, implementation, out_specs=None, twins=MappingProxyType({}), **params):
        operands = match_varying(*(settle(rules.op, x) for x in operands))
        is_manual = any(jax.typeof(x).sharding.mesh.manual_axes for x in operands)
        if is_manual or mesh_rules is None:
            operands = [replicate(rules.op, x) for x in operands]
            run = partial(on_shards.bind, implementation=implementation, **params)
            results = run(*operands)
            return results if out_specs is None else list(map(reshard, results, out_specs))
        twin_of = dict(twin_of=tuple(twins)) if twins else {}
        run = partial(on_arrays.bind, implementation=implementation, **twin_of, **params)
        arrays = *operands, *(settle(rules.op, x) for x in twins.values())
        if explicit_mesh(operands) is None:
            return run(*arrays)
        if out_specs is None:
            own = rules.without_shard_params(params)
            results = shape_rule(*map(jax.typeof, operands), **own)
            out_specs = result_specs(mesh_rules.partition_rule(*operands, **own), operands, results)
        return with_auto_axes(run, arrays, lambda: out_specs)

    def batch(operands, dims, twin_of=(), **params):
        operands, dims = (without_twins(xs, twin_of) for xs in (operands, dims))
        axes = axes_of_batch(operands, dims)
        operands = [replicate(rules.op, x) for x in operands]
        if batch_rule is not None:
            results, result_dims = batch_rule(operands, dims, **params)
        else:
            results = bind_each(bind, operands, dims, **params)
            result_dims = [0] * len(results)
        # jax.vmap wants them cut as the operands are.
        return list(map(partial(cut_batch, axes), results, result_dims)), result_dims

    # There are two primitives. The partitioned one cannot be lowered without devices. In a
    # shard_map the operands are shards already, and partitioning them may abort the process.
    def make(lower: Callable[..., Any]) -> Primitive:
        of_platforms = partial(rules.lower_default, lower), partial(rules.lower_cuda, lower)
        return make_primitive(rules, *of_platforms, batch)

    on_shards = on_arrays = make(rules.lower_shards)
    if mesh_rules is not None:
        on_arrays = make(rules.lower_arrays)
        if NEEDS_DEVICES is not None:
            NEEDS_DEVICES.add(on_arrays)

    return bind


def make_primitive(
    rules: Rules,
    lower: Callable[..., Any],
    lower_cuda: Callable[..., Any],
    batch: Callable[..., Any],
) -> Primitive:
    """Returns a primitive with these rules, and these of lowering and of batching."""
    primitive = Primitive(rules.name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(rules.abstract_eval)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = rules.jvp
    partial_eval.dce_rules[primitive] = rules.dce
    return primitive
