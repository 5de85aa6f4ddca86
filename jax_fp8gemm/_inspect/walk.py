"""evaluate: runs a jaxpr and measures on the way; calls_of: lists its equations without running.

Both go into the jaxprs of jit, jax.checkpoint, custom derivatives, scan, while loops, cond and
shard_map. Measurements leave a loop as one more result. So nothing calls back to the host, and
evaluate can be jitted, differentiated and mapped as any function can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8gemm._inspect import site
from jax_fp8gemm._primitives.joint import APART
from jax_fp8gemm._sharding.explicit_axes import explicit_mesh
from jax_fp8gemm._sharding.manual_axes import match_varying

# A key for each measurement, and the measurements (number of keys, number of fields).
Found = tuple[list[Any], jax.Array]
_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat",
            "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """How a walk measures.

    Attributes:
      of_eqn: (eqn, name stack, operands, results) -> keys and one row of fields for each.
      merge: (several, keys, fields) -> (keys, fields): the rows of several runs of an equation.
      identity: (fields,), the row that changes no other when they are merged.
    """

    of_eqn: Callable[..., Found]
    merge: Callable[[jax.Array], jax.Array]
    identity: jax.Array


@dataclass(frozen=True)
class Call:
    """An equation of ours. num_runs is None in a while loop, whose length no jaxpr tells."""

    eqn: Any
    stack: str
    num_runs: int | None
    is_conditional: bool


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Returns the jaxpr of a call, its constants, and the types of its results.

    The jaxpr has no equations whose results nobody uses: jit does not compile them either.
    """
    closed, out_types = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return jaxpr, closed.consts, out_types


def calls_of(jaxpr: Any, stack: str = "", runs: int | None = 1, *, is_conditional: bool = False):
    """Yields a Call for each equation of ours, in the order in which they run."""
    for eqn in jaxpr.eqns:
        inner_stack, inner_runs, is_branch = site.join(stack, eqn), runs, is_conditional
        if site.is_ours(eqn):
            yield Call(eqn, inner_stack, runs, is_conditional)
            continue
        if eqn.primitive.name == "scan" and runs is not None:
            inner_runs = runs * eqn.params["length"]
        if eqn.primitive.name == "while":
            inner_runs = None
        if eqn.primitive.name == "cond":
            is_branch = True
        for inner in _jaxprs(eqn.params):
            yield from calls_of(inner, inner_stack, inner_runs, is_conditional=is_branch)


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner, "jaxpr"):
                yield inner.jaxpr
            elif hasattr(inner, "eqns"):
                yield inner


def has_quantisations(eqn: Any) -> bool:
    """Returns whether a jaxpr in the parameters of an equation quantises."""
    calls = (call for inner in _jaxprs(eqn.params) for call in calls_of(inner))
    return any(site.is_quantisation(call.eqn) or site.has_parts(call.eqn) for call in calls)


class Walk:
    """Evaluates jaxprs, and measures their quantisations. `missed` names what it does not enter."""

    def __init__(self, measure: Measure):
        self.measure = measure
        self.missed: set[str] = set()

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], stack: str = ""):
        """Returns the results of a jaxpr, and what was found in it."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        keys: list[Any] = []
        rows = [jnp.zeros((0, self.measure.identity.size), jnp.float32)]
        for eqn in jaxpr.eqns:
            operands = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            with eqn.ctx.manager:
                results, found = self._run(eqn, operands, site.join(stack, eqn))
            if found is not None:
                keys += found[0]
                rows.append(found[1])
            values.update(zip(eqn.outvars, results, strict=True))
        results = [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]
        return results, (keys, _joined(rows))

    def _run(self, eqn: Any, operands: list[Any], stack: str) -> tuple[list[Any], Found | None]:
        name = eqn.primitive.name
        if site.is_quantisation(eqn):
            results = _bind(eqn, operands)
            return results, self.measure.of_eqn(eqn, stack, operands, results)
        if site.has_parts(eqn):
            parts = jax.make_jaxpr(partial(APART[name], **eqn.params))(*operands)
            return self._inner(parts, operands, stack)
        if not has_quantisations(eqn):
            return _bind(eqn, operands), None
        run = {"scan": self._scan, "while": self._while, "cond": self._cond,
               "shard_map": self._shard_map}.get(name)  # fmt: skip
        if name in _INLINED:
            inner = next(eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                         if k in eqn.params)  # fmt: skip
            return self._inner(inner, operands, stack)
        if run is not None:
            return run(eqn.params, operands, stack)
        self.missed.add(f"{stack}/{name}".strip("/"))
        return _bind(eqn, operands), None

    def _inner(self, closed: Any, args: Sequence[Any], stack: str):
        if hasattr(closed, "consts"):
            return self.evaluate(closed.jaxpr, closed.consts, args, stack)
        return self.evaluate(closed, (), args, stack)

    def _keys(self, closed: Any, args: Sequence[Any], stack: str) -> list[Any]:
        """Returns the keys that a jaxpr's evaluation would find."""
        keys: list[Any] = []
        jax.eval_shape(lambda *xs: keys.extend(self._inner(closed, xs, stack)[1][0]), *args)
        return keys

    def _scan(self, params: dict[str, Any], operands: list[Any], stack: str):
        num_consts, num_carry = _scan_counts(params, len(operands))
        consts, rest = operands[:num_consts], operands[num_consts:]
        carry, xs = rest[:num_carry], rest[num_carry:]
        keys: list[Any] = []

        def body(carry: Any, x: Any):
            results, (keys[:], rows) = self._inner(params["jaxpr"], [*consts, *carry, *x], stack)
            return results[:num_carry], (results[num_carry:], rows)

        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, rows) = lax.scan(body, carry, xs, **how)
        identity = jnp.broadcast_to(self.measure.identity, (1, *rows.shape[1:]))
        return [*carry, *ys], (keys, self.measure.merge(_joined([rows, identity])))

    def _while(self, params: dict[str, Any], operands: list[Any], stack: str):
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, rest = operands[:num_cond], operands[num_cond:]
        consts, carry = rest[:num_body], rest[num_body:]
        keys = self._keys(params["body_jaxpr"], [*consts, *carry], stack)

        def condition(state: Any):
            (goes_on,), _ = self._inner(params["cond_jaxpr"], [*cond_consts, *state[0]], stack)
            return goes_on

        def body(state: Any):
            carry, rows = state
            results, (_, new) = self._inner(params["body_jaxpr"], [*consts, *carry], stack)
            return results, self.measure.merge(jnp.stack([rows, new]))

        start = match_varying(
            jnp.tile(self.measure.identity, (len(keys), 1)), *map(jnp.asarray, operands)
        )[0]
        carry, rows = lax.while_loop(condition, body, (carry, start))
        return carry, (keys, rows)

    def _cond(self, params: dict[str, Any], operands: list[Any], stack: str):
        index, *args = operands
        each = [self._keys(branch, args, stack) for branch in params["branches"]]
        start = match_varying(self.measure.identity, *map(jnp.asarray, operands))[0]
        identity = lambda count: jnp.tile(start, (count, 1))

        def branch(i: int):
            def run(*args: Any):
                results, (_, rows) = self._inner(params["branches"][i], args, stack)
                before, after = (sum(map(len, keys)) for keys in (each[:i], each[i + 1 :]))
                return results, _joined([identity(before), rows, identity(after)])

            return run

        results, rows = lax.switch(index, [branch(i) for i in range(len(each))], *args)
        return results, (sum(each, []), rows)

    def _shard_map(self, params: dict[str, Any], operands: list[Any], stack: str):
        axes = tuple(sorted(params["newly_manual_axes"]))
        keys: list[Any] = []

        def body(*args: Any):
            results, (keys[:], rows) = self._inner(params["jaxpr"], args, stack)
            return results, rows[None]

        out_specs = (list(params["out_specs"]), PartitionSpec(axes))
        results, rows = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*operands)
        return results, (keys, self.measure.merge(rows))


def _joined(rows: Sequence[jax.Array]) -> jax.Array:
    """Concatenates rows, replicated if the caller or one of them has Explicit mesh axes.

    Ops of ours run where Explicit axes are Auto, for a moment. So rows measured there have other
    axes in their type than those that a shard_map returned.
    """
    mesh = explicit_mesh(rows)
    if mesh is None:
        return jnp.concatenate(rows)
    replicated = NamedSharding(mesh, PartitionSpec(None, None))
    with jax.sharding.use_abstract_mesh(mesh):
        cast: Any = jax.sharding.auto_axes(
            lambda x: x, axes=mesh.explicit_axes, out_sharding=replicated
        )
        return jnp.concatenate([cast(row) for row in rows])


def _scan_counts(params: dict[str, Any], num_operands: int) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are its carry."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # From jax 0.12 on, a tree says so.
    consts, carry, _ = params["ft_in"].update(list(range(num_operands))).unpack()
    return len(list(consts)), len(list(carry))


def _bind(eqn: Any, operands: list[Any]) -> list[Any]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]
