"""Rules: the rules of an op, and how a program with the op is lowered by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.experimental.xla_metadata import (
    set_xla_metadata,  # pyright: ignore[reportUnknownVariableType]  # JAX leaves it untyped
)
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_fp8gemm._data import formats
from jax_fp8gemm._primitives import fallback
from jax_fp8gemm._runtime import jax_drift
from jax_fp8gemm._sharding.cache_tag import tag
from jax_fp8gemm._sharding.partition import partitioned
from jax_fp8gemm._sharding.rule import PartitionRule

Arrays = Sequence[jax.Array]

# NOTE: an eager call that is partitioned fails unless JAX knows that the primitive needs devices
# when it is lowered. No public function says so.
NEEDS_DEVICES = jax_drift.optional("jax._src.dispatch.prim_requires_devices_during_lowering")
# Implementations in plain JAX, which run on any machine.
PLAIN = ("xla", "emulate")
_eager_folding = jax_drift.optional("jax._src.config.eager_constant_folding", nullcontext)


class Forms(NamedTuple):
    """What an op computes, in each of its implementations: (*operands, **params) -> the results.

    Attributes:
      reference: in plain JAX.
      ffi_call: the kernel, by jax.ffi.ffi_call.
      emulation: in plain JAX, with the bits of the kernel. None: the reference has them.
      has_one_reader: (*operands, **params) -> whether the results are new arrays that one op reads,
        as weight gradients are.
    """

    reference: Callable[..., Arrays]
    ffi_call: Callable[..., Arrays]
    emulation: Callable[..., Arrays] | None = None
    has_one_reader: Callable[..., bool] = lambda *operands, **params: False


class MeshRules(NamedTuple):
    """How a mesh divides an op.

    Attributes:
      partition_rule: (*avals, **params) -> a PartitionRule, which says where jit may cut the
        operands.
      run_shard: (run, *operands, shards, **params) -> the results on the Shards of one device. run
        is the reference, the emulation or the FFI call. None: each device calls
        run(*operands, **params).
      shard_params: names of parameters that the shape rule, the forms and the partition rule do not
        take.
    """

    partition_rule: Callable[..., PartitionRule]
    run_shard: Callable[..., Arrays] | None = None
    shard_params: Sequence[str] = ()


@dataclass(frozen=True)
class Rules:
    """Arguments of define_primitive, and the rules of a JAX primitive made of them."""

    name: str
    shape_rule: Callable[..., Any]
    forms: Forms
    dce_rule: Callable[..., Any] | None
    mesh_rules: MeshRules | None

    @property
    def op(self) -> str:
        return self.name.removeprefix("jax_fp8gemm_")

    def without_shard_params(self, params: dict[str, Any]) -> dict[str, Any]:
        left_out = self.mesh_rules.shard_params if self.mesh_rules is not None else ()
        return {name: value for name, value in params.items() if name not in left_out}

    # NOTE: a scan stores what it stacks by dynamic-update-slice. XLA fuses a custom call with that,
    # so the kernel writes into the stack. But if the same result has other readers, XLA runs the
    # call a second time for them. Nor may a call write there whose result takes the place of an
    # operand: XLA fuses that too. Behind a barrier the result is copied into the stack instead.

    def kernel(self, *operands, **params):
        """Calls the kernel. Barriers stand behind what may be stacked and read: not FP8 values.

        Of these, one orientation is read by the next product, and the other is stacked for the
        backward pass.
        """
        return self._call(lambda x: x.dtype not in formats.FP8_DTYPES, operands, params)

    def kernel_on_mesh(self, *operands, **params):
        """The same on a mesh that divides the op: collectives may read stacked FP8 values too."""
        return self._call(lambda x: True, operands, params)

    def _call(self, has_barrier: Callable[[Any], bool], operands, params) -> Arrays:
        results = self.forms.ffi_call(*operands, **params)
        if self.forms.has_one_reader(*operands, **params):
            return results
        return [lax.optimization_barrier(x) if has_barrier(x) else x for x in results]

    @cached_property
    def shared_reference(self) -> Callable[..., Arrays]:
        return _shared(f"{self.op}_reference", self.forms.reference)

    @cached_property
    def shared_emulation(self) -> Callable[..., Arrays]:
        return _shared(f"{self.op}_emulation", self._emulation)

    @property
    def _emulation(self) -> Callable[..., Arrays]:
        return self.forms.emulation or self.forms.reference

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
        assert self.mesh_rules is not None
        _check_partitioner(self.op, ctx)
        own = self.without_shard_params(params)
        if NEEDS_DEVICES is None:  # and there is one device
            alone = lambda *xs: run(*without_twins(xs, twin_of), **own)
            return mlir.lower_fun(alone, multiple_results=True)(ctx, *operands)
        is_kernel = run == self.kernel
        if is_kernel and _num_devices(ctx) > 1:
            run = self.kernel_on_mesh
        rule = self.mesh_rules.partition_rule(*without_twins(ctx.avals_in, twin_of), **own)
        run_shard = self.mesh_rules.run_shard
        local = run_shard and partial(run_shard, run, **params)
        function = partitioned(partial(run, **own), rule, local, twin_of)
        tagged = lambda *xs: tag(function(*xs), self.name, is_kernel, params)
        # NOTE: in jax.ensure_compile_time_eval() JAX computes constants at once, as arrays, and
        # custom_partitioning accepts no arrays as constants.
        with _eager_folding(False):
            return mlir.lower_fun(tagged, multiple_results=True)(ctx, *operands)

    def lower_default(self, lower, ctx, *operands, implementation, **params):
        if implementation not in PLAIN:
            reason = f"lowering for {_platforms(ctx)}, not for an NVIDIA GPU"
            fallback.fall_back(self.op, implementation, reason)
        run = self.plain(implementation, is_shared=_platforms(ctx) == "cpu")
        return lower(run, ctx, *operands, **params)

    def lower_cuda(self, lower, ctx, *operands, implementation, **params):
        reason = None if implementation in PLAIN else fallback.unusable_reason()
        if reason is not None:
            fallback.fall_back(self.op, implementation, reason)
        is_plain = implementation in PLAIN or reason is not None
        run = self.plain(implementation, is_shared=False) if is_plain else self.kernel
        return lower(run, ctx, *operands, **params)

    def plain(self, implementation, is_shared: bool) -> Callable[..., Arrays]:
        """The function in plain JAX that stands for the kernel."""
        if implementation == "emulate":
            return self.shared_emulation if is_shared else self._emulation
        return self.shared_reference if is_shared else self.forms.reference

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
            f"{self.op}: matmul, dot_general, einsum, ragged_dot, ragged_dot_general, gated_mlp, "
            f"moe_mlp and moe_layer are differentiable once, in reverse mode, and {self.op} is "
            "not: FP8 values have no useful tangents. Take a gradient of a gradient with "
            "recipe='bf16'. Where quantize(w) is differentiated, pass the op w itself or quantize "
            "jax.lax.stop_gradient(w)."
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


def _like(aval, out: jax.ShapeDtypeStruct):
    """Returns the aval of `out`: replicated on the mesh of `aval`, with its varying axes."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(None,) * len(out.shape)))
    return aval.update(shape=out.shape, dtype=out.dtype, sharding=sharding, weak_type=False)


def _platforms(ctx) -> str:
    return ", ".join(ctx.platforms or ctx.module_context.platforms)


def _num_devices(ctx) -> int:
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def _check_partitioner(op: str, ctx) -> None:
    num_devices = _num_devices(ctx)
    if num_devices > 1 and NEEDS_DEVICES is None:
        what = f"{op}: jit over {num_devices} devices must have a JAX that can partition the op"
        raise NotImplementedError(jax_drift.unsupported(what))
    if num_devices > 1 and not getattr(jax.config, "jax_use_shardy_partitioner", True):
        # NOTE: with JAX 0.10.2 GSPMD would abort the process, for it needs rules of its own.
        raise NotImplementedError(
            f"{op}: jit over {num_devices} devices must partition by Shardy; got "
            "jax_use_shardy_partitioner=False. Leave it at its default, or call this in a "
            "jax.shard_map."
        )
