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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import jax
from jax import lax
from jax.experimental.xla_metadata import (
    set_xla_metadata,  # pyright: ignore[reportUnknownVariableType]  # JAX leaves it untyped
)
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import PartitionSpec

from jax_fp8gemm._primitives import fallback
from jax_fp8gemm._primitives.batch import bind_each
from jax_fp8gemm._runtime import jax_drift
from jax_fp8gemm._sharding.cache_tag import tag
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh, reshard, result_specs, with_auto_axes
from jax_fp8gemm._sharding.manual_axes import match_varying, replicate, settle
from jax_fp8gemm._sharding.partition import partitioned
from jax_fp8gemm._sharding.rule import PartitionRule

Arrays = Sequence[jax.Array]

# NOTE: an eager call that is partitioned fails unless JAX knows that the primitive needs devices
# when it is lowered. No public function says so.
_needs_devices = jax_drift.optional("jax._src.dispatch.prim_requires_devices_during_lowering")
# Implementations in plain JAX, which run on any machine.
_PLAIN = ("xla", "emulate")
_eager_folding = jax_drift.optional("jax._src.config.eager_constant_folding", nullcontext)


def define_primitive(
    name: str,
    *,
    shape_rule: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    reference: Callable[..., Arrays],
    ffi_call: Callable[..., Arrays],
    emulation: Callable[..., Arrays] | None = None,
    batch_rule: Callable[..., tuple[Arrays, Sequence[int]]] | None = None,
    dce_rule: Callable[..., tuple[dict[str, Any], Sequence[int]]] | None = None,
    partition_rule: Callable[..., PartitionRule] | None = None,
    run_shard: Callable[..., Arrays] | None = None,
    shard_params: Sequence[str] = (),
) -> Callable[..., Arrays]:
    """Makes a primitive and returns the function that binds it.

    Args:
      name: the name of the primitive, `jax_fp8gemm_<op>`. Errors start with `<op>`.
      shape_rule: (*avals, **params) -> the types of the results. Raises on bad operands.
      reference: (*operands, **params) -> the results, in plain JAX.
      ffi_call: (*operands, **params) -> the results, by jax.ffi.ffi_call.
      emulation: (*operands, **params) -> the results with the bits of the kernel, in plain JAX.
        None: those of the reference have them.
      batch_rule: (operands, batch dims, **params) -> (results, their batch dims). It binds the
        primitive again. None: the op runs for one batch element after another.
      dce_rule: (which results are used, **params) -> (new params, indices of the old results that
        the equation then has). The new equation must compute the used results.
      partition_rule: (*avals, **params) -> a PartitionRule, which says where jit may cut the
        operands. None: the compiler gathers sharded operands.
      run_shard: (run, *operands, shards, **params) -> the results on the Shards of one device. run
        is the reference, the emulation or the FFI call. None: each device calls
        run(*operands, **params).
      shard_params: names of parameters that the shape rule, the reference, the emulation, the FFI
        call and the partition rule do not take.
    Returns:
      bind(*operands, implementation, out_specs=None, twins={}, **params) -> a list of results.
      out_specs holds a PartitionSpec for each result and says how Explicit mesh axes cut it. None:
      the partition rule derives them from the operands; without a rule the results are replicated.
      In a shard_map all operands get the union of their varying manual axes. twins holds, by the
      index of an operand, the same array with its last two dimensions swapped, which a mesh moves
      in its place (_sharding/twins.py). A shard_map and jax.vmap leave the twins out.
    """
    rules = _Rules(
        name,
        shape_rule,
        reference,
        ffi_call,
        emulation or reference,
        dce_rule,
        partition_rule,
        run_shard,
        frozenset(shard_params),
    )

    def bind(*operands, implementation, out_specs=None, twins=MappingProxyType({}), **params):
        operands = match_varying(*(settle(rules.op, x) for x in operands))
        is_manual = any(jax.typeof(x).sharding.mesh.manual_axes for x in operands)
        if is_manual or partition_rule is None:
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
            out_specs = result_specs(partition_rule(*operands, **own), operands, results)
        return with_auto_axes(run, arrays, lambda: out_specs)

    def batch(operands, dims, twin_of=(), **params):
        operands, dims = (without_twins(xs, twin_of) for xs in (operands, dims))
        operands = [replicate(rules.op, x) for x in operands]
        if batch_rule is not None:
            return batch_rule(operands, dims, **params)
        results = bind_each(bind, operands, dims, **params)
        return results, [0] * len(results)

    # There are two primitives. The partitioned one cannot be lowered without devices. In a
    # shard_map the operands are shards already, and partitioning them may abort the process.
    on_shards = on_arrays = _make(rules, rules.lower_shards, batch)
    if partition_rule is not None:
        on_arrays = _make(rules, rules.lower_arrays, batch)
        if _needs_devices is not None:
            _needs_devices.add(on_arrays)

    return bind


@dataclass(frozen=True)
class _Rules:
    """The arguments of define_primitive, and the rules of a JAX primitive made of them."""

    name: str
    shape_rule: Callable[..., Any]
    reference: Callable[..., Arrays]
    ffi_call: Callable[..., Arrays]
    emulation: Callable[..., Arrays]
    dce_rule: Callable[..., Any] | None
    partition_rule: Callable[..., PartitionRule] | None
    run_shard: Callable[..., Arrays] | None
    shard_params: frozenset[str]

    @property
    def op(self) -> str:
        return self.name.removeprefix("jax_fp8gemm_")

    def without_shard_params(self, params: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in params.items() if name not in self.shard_params}

    def kernel(self, *operands, **params):
        # NOTE: a scan stores residuals by dynamic-update-slice. XLA fuses a custom call with it,
        # and runs the call a second time for other readers of the result. The barrier prevents it.
        return lax.optimization_barrier(self.ffi_call(*operands, **params))

    @cached_property
    def shared_reference(self) -> Callable[..., Arrays]:
        return _shared(f"{self.op}_reference", self.reference)

    @cached_property
    def shared_emulation(self) -> Callable[..., Arrays]:
        return _shared(f"{self.op}_emulation", self.emulation)

    def abstract_eval(self, *avals, implementation, twin_of=(), **params):
        avals = without_twins(avals, twin_of)
        # NOTE: bind() makes all operands vary over the same axes, with one exception: a shard_map
        # without check_vma inside one with it. Nothing can be cast there, and the results of JAX's
        # own primitives vary over no axis.
        like = min(avals, key=lambda aval: len(aval.manual_axis_type.varying))
        results = self.shape_rule(*avals, **self.without_shard_params(params))
        return [_like(like, out) for out in results]

    def lower_shards(self, run, ctx, *operands, **params):
        params = self.without_shard_params(params)
        return mlir.lower_fun(partial(run, **params), multiple_results=True)(ctx, *operands)

    def lower_arrays(self, run, ctx, *operands, twin_of=(), **params):
        assert self.partition_rule is not None
        _check_partitioner(self.op, ctx)
        own = self.without_shard_params(params)
        if _needs_devices is None:  # and there is one device
            alone = lambda *xs: run(*without_twins(xs, twin_of), **own)
            return mlir.lower_fun(alone, multiple_results=True)(ctx, *operands)
        rule = self.partition_rule(*without_twins(ctx.avals_in, twin_of), **own)
        local = self.run_shard and partial(self.run_shard, run, **params)
        function = partitioned(partial(run, **own), rule, local, twin_of)
        is_kernel = run == self.kernel
        tagged = lambda *xs: tag(function(*xs), self.name, is_kernel, params)
        # NOTE: in jax.ensure_compile_time_eval() JAX computes constants at once, as arrays, and
        # custom_partitioning accepts no arrays as constants.
        with _eager_folding(False):
            return mlir.lower_fun(tagged, multiple_results=True)(ctx, *operands)

    def lower_default(self, lower, ctx, *operands, implementation, **params):
        if implementation not in _PLAIN:
            reason = f"lowering for {_platforms(ctx)}, not for an NVIDIA GPU"
            fallback.fall_back(self.op, implementation, reason)
        run = self.plain(implementation, is_shared=_platforms(ctx) == "cpu")
        return lower(run, ctx, *operands, **params)

    def lower_cuda(self, lower, ctx, *operands, implementation, **params):
        reason = None if implementation in _PLAIN else fallback.unusable_reason()
        if reason is not None:
            fallback.fall_back(self.op, implementation, reason)
        is_plain = implementation in _PLAIN or reason is not None
        run = self.plain(implementation, is_shared=False) if is_plain else self.kernel
        return lower(run, ctx, *operands, **params)

    def plain(self, implementation, is_shared: bool) -> Callable[..., Arrays]:
        """The function in plain JAX that stands for the kernel."""
        if implementation == "emulate":
            return self.shared_emulation if is_shared else self.emulation
        return self.shared_reference if is_shared else self.reference

    # From jax 0.12 on, there is an argument more before the equation. It concerns Refs alone.
    def dce(self, used, *live_and_eqn):
        eqn = live_and_eqn[-1]
        if not any(used):
            return [False] * len(eqn.invars), None
        if self.dce_rule is not None:
            params, kept = self.dce_rule(used, **eqn.params)
            eqn = eqn.replace(params=params, outvars=[eqn.outvars[i] for i in kept])
        return [True] * len(eqn.invars), eqn

    def jvp(self, primals, tangents, **params):
        raise NotImplementedError(
            f"{self.op}: matmul, dot_general, ragged_dot, ragged_dot_general, moe_mlp and "
            f"moe_layer are differentiable once, in reverse mode, and {self.op} is not: FP8 values "
            "have no useful tangents. Take no gradient of a gradient. Pass a product w itself "
            "rather than quantize(w), or quantize jax.lax.stop_gradient(w)."
        )


def without_twins(operands: Sequence[Any], twin_of: Sequence[int]) -> Sequence[Any]:
    """Returns the operands of a primitive, or what belongs to each, without those of the twins."""
    return operands[: len(operands) - len(twin_of)]


def _shared(name: str, run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Returns `run` as one function of a program for all calls with the same types and parameters.

    XLA's CPU backend must not inline it: it would fuse each call with what is around, and compile
    it anew.
    """

    def run_with(params, *operands):
        return run(*operands, **dict(params))

    run_with.__name__ = name
    jitted = jax.jit(run_with, static_argnums=0)

    def call(*operands, **params):
        results = jitted(tuple(sorted(params.items())), *operands)
        return cast(Arrays, set_xla_metadata(results, inlineable="false"))

    return call


def _make(rules: _Rules, lower: Callable[..., Any], batch: Callable[..., Any]) -> Primitive:
    """Returns a primitive that `lower` lowers: rules.lower_shards or rules.lower_arrays."""
    primitive = Primitive(rules.name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(rules.abstract_eval)
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    mlir.register_lowering(primitive, partial(rules.lower_default, lower))
    mlir.register_lowering(primitive, partial(rules.lower_cuda, lower), platform="cuda")
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = rules.jvp
    partial_eval.dce_rules[primitive] = rules.dce
    return primitive


def _like(aval, out: jax.ShapeDtypeStruct):
    """Returns the aval of `out`: replicated on the mesh of `aval`, with its varying axes."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(None,) * len(out.shape)))
    return aval.update(shape=out.shape, dtype=out.dtype, sharding=sharding, weak_type=False)


def _platforms(ctx) -> str:
    return ", ".join(ctx.platforms or ctx.module_context.platforms)


def _check_partitioner(op: str, ctx) -> None:
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if num_devices > 1 and _needs_devices is None:
        what = f"{op}: jit over {num_devices} devices must have a JAX that can partition the op"
        raise NotImplementedError(jax_drift.unsupported(what))
    if num_devices > 1 and not getattr(jax.config, "jax_use_shardy_partitioner", True):
        # NOTE: with JAX 0.10.2 GSPMD would abort the process, for it needs rules of its own.
        raise NotImplementedError(
            f"{op}: jit over {num_devices} devices must partition by Shardy; got "
            "jax_use_shardy_partitioner=False. Leave it at its default, or call this in a "
            "jax.shard_map."
        )
