"""explain: which ops of the package a function runs, how, and how long they should take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8gemm._data.checks import check_callable, short_type
from jax_fp8gemm._inspect import site, table
from jax_fp8gemm._inspect.walk import Call, calls_of, trace
from jax_fp8gemm._primitives.define import without_twins
from jax_fp8gemm._primitives.gemm_dims import matrix_shapes, num_batch_dims, num_parts
from jax_fp8gemm._runtime import hopper
from jax_fp8gemm._runtime.backend_info import backend_info
from jax_fp8gemm._tuning import choose, cost, gated_config, masked_rows
from jax_fp8gemm._tuning.tile import TileConfig


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: a record for each op, in the order of the program. Prints as a table.

    A record is a dictionary of strings and numbers, as for json.dumps. Its names:

    - path: the user's part of the name stack: modules, and scopes of jax.named_scope.
    - op: the op that the user called, as "matmul".
    - call: what runs for it: "quantize", "gemm", "grouped_gemm" and so on.
    - pass: "forward", "backward", or "recomputed" by jax.checkpoint.
    - runs: how often it runs; None in a while loop. A branch of a cond counts as run.
    - operands, results: dtypes and shapes; in a shard_map, those of one device.
    - implementation: "cuda", "emulate", or "reference" and why.
    - config: the tile config of a product on a GPU with 132 SMs; None for a quantisation.
    - bytes: of operands and results of one run.
    - flop: of one run; 0 for a quantisation. The rows of a grouped product count as if each were
      in a group, or as its expected_rows says. The tokens of a grouped weight gradient count with
      the zeros that fill blocks.
    - time_us: the predicted time of one run on an H200.

    Attributes:
      records: a record for each op.
      flop: the sum of runs x flop; None if a while loop runs an op.
      time_us: the sum of runs x time_us, or None likewise.
    """

    records: list[dict[str, Any]]

    @property
    def flop(self) -> int | None:
        return self._total("flop")

    @property
    def time_us(self) -> float | None:
        return self._total("time_us")

    def _total(self, name: str) -> Any:
        if any(record["runs"] is None for record in self.records):
            return None
        return sum(record["runs"] * record[name] for record in self.records)

    def __str__(self) -> str:
        if not self.records:
            return "no op of jax_fp8gemm runs"
        total = f"total: {table.cell(self.time_us)} us predicted, {table.cell(self.flop)} FLOP"
        return f"{table.text_table(self.records)}\n{total}"

    def _repr_html_(self) -> str:
        return table.html_of("Explanation", self.records)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Says which ops of this package a call of `function` runs, and how, without running it.

    Args:
      function: a function of arrays, jitted or not. For the backward pass, pass jax.grad(loss).
      args, kwargs: its arguments: pytrees of arrays, or of jax.ShapeDtypeStruct.
    Returns:
      an Explanation. Printed, it is a table.
    Raises:
      TypeError: function is not callable.
    """
    check_callable("explain", function)
    jaxpr, _, _ = trace(function, *args, **kwargs)
    reason = _reason()
    return Explanation([_record(call, reason) for call in calls_of(jaxpr)])


def _reason() -> str | None:
    """Returns why CUDA kernels do not run by default, or None."""
    if (backend := jax.default_backend()) != "gpu":
        return backend_info().reason or f"lowering for {backend}, not for an NVIDIA GPU"
    return backend_info().reason


def _record(call: Call, reason: str | None) -> dict[str, Any]:
    eqn = call.eqn
    name = eqn.primitive.name.removeprefix(site.PREFIX)
    path, op = site.path_and_op(call.stack, eqn)
    implementation = _implementation(eqn.params["implementation"], reason)
    operands, results = ([x.aval for x in xs] for xs in (eqn.invars, eqn.outvars))
    operands = without_twins(operands, eqn.params.get("twin_of", ()))
    num_bytes = sum(x.size * x.dtype.itemsize for x in (*operands, *results))
    config, flop, time_us = None, 0, cost.copy_time_us(num_bytes)
    if (product := _PRODUCTS.get(name)) is not None:
        config, flop, time_us = product(operands, eqn.params)
    return {
        "path": path,
        "op": op,
        "call": name,
        "pass": site.pass_of(call.stack),
        "runs": call.num_runs,
        "operands": ", ".join(map(short_type, operands)),
        "results": ", ".join(short_type(x) for x in results),
        "implementation": implementation,
        "config": config,
        "bytes": num_bytes,
        "flop": flop,
        "time_us": time_us,
    }


def _implementation(chosen: str | None, reason: str | None) -> str:
    if chosen == "emulate":
        return chosen
    if chosen == "xla":
        reason = "implementation='xla'"
    return "cuda" if reason is None else f"reference: {reason}"


def _spec(params: dict[str, Any], *, is_1d1d: bool, accumulate: bool) -> dict[str, bool]:
    out_f32, transpose_out = params["out_dtype"] == jnp.float32, params.get("is_2d1d", False)
    return dict(
        is_1d1d=is_1d1d, transpose_out=transpose_out, out_f32=out_f32, accumulate=accumulate
    )


def _gemm(operands: list[Any], params: dict[str, Any]) -> tuple[str | None, int, float]:
    num_k_dims, is_1d1d = params["num_k_dims"], params["is_1d1d"]
    (m, k), _, (n, _), *_ = matrix_shapes(operands, num_k_dims)
    num_products = math.prod(operands[0].shape[: num_batch_dims(operands[2], num_k_dims)])
    flop = 2 * num_products * m * n * k
    if flop == 0:
        return None, 0, 0.0
    spec = _spec(params, is_1d1d=is_1d1d, accumulate=len(operands) == 5)
    padded = *_exchanged(m, _up(n, 8), spec), _up(k, 16)
    parts = num_parts(operands, num_k_dims, params["split_k"])
    config = choose.choose(*padded, **spec, num_sms=hopper.NUM_SMS, num_parts=parts)
    product = _product(*padded, None, spec)
    return _text(config), flop, num_products * choose.predicted_us(config, product)


def _quantizing_gemm(operands: list[Any], params: dict[str, Any]):
    (*rows, k), (n, _) = operands[0].shape, operands[1].shape
    m, n = math.prod(rows), _up(n, 8)
    # The predicted time is that of the product alone.
    spec = _spec(params, is_1d1d=False, accumulate=False)
    config = choose.choose(m, n, k, **spec, num_sms=hopper.NUM_SMS)
    time_us = choose.predicted_us(config, _product(m, n, k, None, spec))
    return f"{_text(config)}, lhs quantised", 2 * m * n * k, time_us


def _grouped(m: int, n: int, k: int, g: int, flop: int, spec: dict[str, bool]):
    if flop == 0:
        return None, 0, 0.0
    m, n = _exchanged(m, n, spec)
    config = choose.choose(m, n, k, g, **spec, num_sms=hopper.NUM_SMS)
    product = _product(m, n, k, g, spec)
    time_us = choose.predicted_us(config, product)
    if not product.is_weight_gradient:
        # The prediction ranks configs. It counts the bytes of groups of rows too low.
        time_us = max(time_us, cost.copy_time_us((m + g * n) * k + m * n * product.out_bytes))
    return _text(config), flop, time_us


def _product(m: int, n: int, k: int, g: int | None, spec: dict[str, bool]) -> choose.Product:
    flags = spec["is_1d1d"], spec["transpose_out"]
    out_bytes = choose.out_bytes(spec["out_f32"], spec["accumulate"])
    return choose.Product(m, n, k, g, *flags, out_bytes, hopper.NUM_SMS)


def _exchanged(m: int, n: int, spec: dict[str, bool]) -> tuple[int, int]:
    """Returns the extents of the product that the kernel computes."""
    return (n, m) if spec["transpose_out"] else (m, n)


def _grouped_gemm(operands: list[Any], params: dict[str, Any]):
    (*rows, k), (g, n, _) = operands[0].shape, operands[2].shape
    m = masked_rows.rows_of_tiles(*rows, expected_rows=params["expected_rows"])
    spec = _spec(params, is_1d1d=False, accumulate=False)
    return _grouped(m, n, k, g, 2 * m * n * k, spec)


def _grouped_gated_gemm(operands: list[Any], params: dict[str, Any]):
    (m, k), (g, n, _) = operands[0].shape, operands[2].shape
    # The predicted time is that of the product alone.
    spec = dict(is_1d1d=False, transpose_out=False, out_f32=False, accumulate=False)
    _, flop, time_us = _grouped(m, n, k, g, 2 * m * n * k, spec)
    return _text(gated_config.TILE_GATED), flop, time_us


def _grouped_wgrad(operands: list[Any], params: dict[str, Any]):
    (m, t), (n, _), (g,) = operands[0].shape, operands[2].shape, operands[4].shape
    is_1d1d = not params["is_2d1d"]
    spec = _spec(params, is_1d1d=is_1d1d, accumulate=len(operands) == 6)
    return _grouped(m, n, t, g, 2 * m * n * t, spec)


def _text(c: TileConfig) -> str:
    cluster = "" if c.cluster_m * c.cluster_n == 1 else f", cluster {c.cluster_m}x{c.cluster_n}"
    if c.cluster_k > 1:
        what = "k added up in parts" if c.partial_sums else "k divided"
        cluster = f", {what} by clusters of {c.cluster_k}"
    return f"{c.block_m}x{c.block_n}, {c.num_consumers} consumers, {c.num_stages} stages{cluster}"


def _up(extent: int, multiple: int) -> int:
    return extent + -extent % multiple


_PRODUCTS = {
    "gemm": _gemm,
    "quantizing_gemm": _quantizing_gemm,
    "grouped_gemm": _grouped_gemm,
    "grouped_gated_gemm": _grouped_gated_gemm,
    "grouped_wgrad": _grouped_wgrad,
}
