"""Routing: how a router scores and chooses experts, and the checks of its arguments."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import jax.numpy as jnp

from jax_fp8gemm._data import arrays, checks, formats
from jax_fp8gemm.moe._scoring import Scoring, check_scoring

if TYPE_CHECKING:
    from jaxtyping import Array

_LARGEST = float(jnp.finfo(jnp.float32).max)


class RouteArguments(TypedDict, total=False):
    """The keywords of route beside return_load, for overloads: a result depends on return_load."""

    scoring: Scoring
    normalize: bool
    bias: Array | None
    n_group: int | None
    topk_group: int | None
    scale: float


class RouteOptions(RouteArguments, total=False):
    """Those and batch_invariant, which moe_layer takes from its recipe."""

    batch_invariant: bool


@dataclass(frozen=True)
class Routing:
    """The static arguments of route beside top_k, which route describes; hashable once checked."""

    scoring: Scoring = "softmax"
    normalize: bool = True
    n_group: int | None = None
    topk_group: int | None = None
    scale: float = 1.0

    def changes(self) -> dict[str, Any]:
        """Returns the arguments that are not the defaults."""
        return {f.name: got for f in fields(self) if (got := getattr(self, f.name)) != f.default}

    def share_of_part(self, parts: int) -> float:
        """Returns a bound of the share of tokens that need a given one of the experts' equal parts.

        It is that of tokens with one of its groups among their topk_group, if all groups are as
        likely; 1 where there are no groups, or a part has pieces of groups.
        """
        if self.n_group is None or self.topk_group is None:
            return 1.0
        if parts % self.n_group == 0:
            return self.topk_group / self.n_group
        groups, rest = divmod(self.n_group, parts)
        choices = lambda number: math.comb(number, self.topk_group or 0)
        return 1.0 if rest else 1 - choices(self.n_group - groups) / choices(self.n_group)


def check_types(op: str, routing: Routing) -> None:
    """Raises unless each argument of `routing` is one by itself."""
    groups = dict(n_group=routing.n_group, topk_group=routing.topk_group)
    checks.check_static(op, scale=routing.scale, **groups)
    checks.check_bool(op, normalize=routing.normalize)
    check_scoring(op, routing.scoring)
    for name, number in groups.items():
        if number is not None and checks.as_index(number) is None:
            got = checks.short_repr(number)
            raise TypeError(f"{op}: {name} must be None or an integer; got {got}")
    scale = routing.scale
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise TypeError(
            f"{op}: scale must be a number of Python or NumPy; got {checks.short_repr(scale)}"
        )
    if not 0 < scale <= _LARGEST:
        got = checks.short_repr(scale)
        raise ValueError(f"{op}: scale must be above 0 and finite in f32; got {got}")


def as_top_k(op: str, top_k: Any, experts: Any) -> int:
    """Returns `top_k` as an int; raises ValueError unless it is 1..num_experts.

    experts: the logits, or num_experts where there are none.
    """
    number, (num_experts, got) = checks.as_index(top_k), _count(experts)
    if number is None or number not in range(1, num_experts + 1):
        raise ValueError(
            f"{op}: top_k must be an integer, 1..num_experts; got {checks.short_repr(top_k)}, {got}"
        )
    checks.check_count(op, "num_experts", num_experts, got)
    return number


def fit(op: str, routing: Routing, top_k: int, experts: Any) -> Routing:
    """Returns `routing` with Python's numbers; raises ValueError unless its groups fit.

    experts: as for as_top_k.
    """
    n_group, topk_group = map(checks.as_index, (routing.n_group, routing.topk_group))
    _check_groups(op, top_k, n_group, topk_group, experts)
    return replace(routing, n_group=n_group, topk_group=topk_group, scale=float(routing.scale))


def _count(experts: Any) -> tuple[int, str]:
    """Returns the number of experts, and what an error says of its origin."""
    if isinstance(experts, int):
        return experts, f"num_experts {experts}"
    return experts.shape[-1], f"logits {checks.short_type(experts)}"


def _check_groups(
    op: str, top_k: int, n_group: int | None, topk_group: int | None, experts: Any
) -> None:
    if n_group is None or topk_group is None:
        if n_group is not topk_group:
            raise ValueError(
                f"{op}: n_group and topk_group must go together; "
                f"got n_group {n_group}, topk_group {topk_group}"
            )
        return
    num_experts, got = _count(experts)
    if n_group < 1 or num_experts % n_group or 1 < n_group > num_experts // 2:
        raise ValueError(
            f"{op}: n_group must divide the experts into groups of 2 or more; got {n_group}, {got}"
        )
    if topk_group not in range(1, n_group + 1):
        raise ValueError(
            f"{op}: topk_group must be 1..n_group; got {topk_group}, n_group {n_group}"
        )
    if top_k > (kept := num_experts // n_group * topk_group):
        raise ValueError(
            f"{op}: top_k must be at most the {kept} experts of topk_group {topk_group} groups; "
            f"got {top_k}"
        )


def check_bias(op: str, bias: Any, num_experts: int) -> jax.Array | None:
    """Returns the bias as an array; raises unless it is None or (num_experts,) floats."""
    if bias is None:
        return None
    bias = arrays.as_array(bias)
    checks.check_array(op, "bias", bias)
    checks.check_dtype(op, "bias", bias, formats.FLOAT_DTYPES)
    if bias.shape != (num_experts,):
        raise ValueError(
            f"{op}: bias must be one number for each of {num_experts} experts; "
            f"got bias {checks.short_type(bias)}"
        )
    return jnp.asarray(bias)
