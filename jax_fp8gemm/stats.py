"""Numbers about the quantised operands of a program, such as the share flushed to zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_fp8gemm._data import checks
from jax_fp8gemm._inspect import measure, table
from jax_fp8gemm._inspect.walk import Walk, trace
from jax_fp8gemm._runtime.warn import warn_caller


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["_keys", "missed"])
@dataclass(frozen=True, eq=False)
class Stats:
    """What `collect` found: a row for each quantised operand. Prints as a table.

    It is a pytree of `rows`, so a jitted function can return it.

    Attributes:
      rows: (number of operands, 9) f32, which `records` explains.
      missed: the name stacks of calls that quantise and that `collect` could not enter.
    """

    rows: jax.Array
    _keys: tuple[measure.Key, ...] = field(repr=False)
    missed: tuple[str, ...]

    def records(self) -> list[dict[str, Any]]:
        """Returns a dictionary of strings and numbers for each row, as for json.dumps.

        Its names:

        - path: the user's part of the name stack: modules, and scopes of jax.named_scope.
        - op: the op that quantises: "matmul", "ragged_dot", "quantize".
        - operand: "lhs", "rhs", "dout" (the cotangent of the result), or "x" of a quantiser.
        - pass: "forward", "backward", or "recomputed" by jax.checkpoint.
        - blocks: "row" or "column", 1x128 blocks along either, or "block", 128x128 blocks.
        - shape, dtype: of the FP8 values.
        - amax: the largest finite magnitude of the operand.
        - flushed: the share of its nonzero values that became zero.
        - saturated: the share that was clipped to the largest FP8 value. 0, unless there is a bug.
        - scale_min, scale_max: the smallest and the largest scale of a block.
        - error: `|dequantised - operand| / |operand|`, 2-norms, without blocks of NaN or Inf.
        - nonfinite: how many values of the operand were NaN or Inf, in all runs.
        """
        rows = np.asarray(self.rows)
        return [key.record(row) for key, row in zip(self._keys, rows, strict=True)]

    def __str__(self) -> str:
        missed = [f"not looked into: {name}" for name in self.missed]
        records = self.records()
        nothing = "no operand was quantised: no product of jax_fp8gemm ran in FP8"
        return "\n".join([table.text_table(records) if records else nothing, *missed])

    def _repr_html_(self) -> str:
        return table.html_of("Stats", self.records())


def collect(function: Callable[..., Any]) -> Callable[..., tuple[Any, Stats]]:
    """Returns `function` with one more result: what happened to each operand that it quantised.

    The program is traced, and numbers are added to it as results. `function` itself stays as it is,
    so a program without `collect` costs nothing. Numbers of the backward pass are there if
    `function` takes the gradient: collect(jax.grad(loss)). Those of a loop are merged over its
    iterations, and those of a shard_map over its devices.

    Args:
      function: takes and returns pytrees of arrays; it may be jitted. What it changes in its
        arguments in place is lost, with a UserWarning: the update of an NNX model, say. Collect
        from what returns the gradients then, flax.nnx.grad(loss).
    Returns:
      a function with the arguments of `function`, which are all arrays. It returns (result, Stats).
      It is jitted. It may be called in other jitted functions.
    Raises:
      TypeError: function is not callable.
    """
    checks.check_callable("stats.collect", function)
    traced = _warning_of_changes(function)

    @jax.jit
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Stats]:
        jaxpr, consts, out_types = trace(traced, *args, **kwargs)
        walk = Walk(measure.quantisations())
        results, (keys, rows) = walk.evaluate(jaxpr, consts, jax.tree.leaves((args, kwargs)))
        result = jax.tree.unflatten(jax.tree.structure(out_types), results)
        return result, Stats(rows, tuple(keys), tuple(sorted(walk.missed)))

    return run


def _warning_of_changes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which warns where it changes its arguments in place.

    If there are more of them or fewer afterwards, it does not: a step may quantise the weights of
    the model that it got.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = jax.tree.leaves((args, kwargs))
        result = function(*args, **kwargs)
        after = jax.tree.leaves((args, kwargs))
        changed = sum(x is not y for x, y in zip(before, after, strict=False))
        if changed and len(before) == len(after):
            warn_caller(
                "stats.collect: function must return what it computes; got changes of "
                f"{changed} arrays of its arguments in place, which are lost, and no quantisation "
                "that only they need is measured. Collect from the function that returns the "
                "gradients, as flax.nnx.grad(loss), and update with them.",
                UserWarning,
            )
        return result

    return run
