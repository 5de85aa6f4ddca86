"""Runs the products of a Flax model in FP8, by the rules of qwix. No line of the model changes::

    model = qwix.quantize_model(model, jax_fp8gemm.qwix.Provider())

While a converted model runs, qwix replaces the functions of JAX by methods of the provider. A
method knows the module that calls it, and so its rule. Outside the model JAX stays as it is.
docs/conversion.md shows linen and NNX models, rules, and what stays in the model's dtype.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.formats import Implementation
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._ops.matmul import matmul
from jax_fp8gemm._ops.product_runner import ProductRunner
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm._ops.ragged_dot import ragged_dot
from jax_fp8gemm._runtime import jax_drift

try:
    import qwix
    from flax import linen, nnx
    from qwix._src.utils.flax_util import get_current_module
except ImportError as error:
    raise ImportError(
        "jax_fp8gemm.qwix: the package qwix, 0.1.8 or newer, must be installed; "
        f"got {error}. Install it with `pip install 'qwix>=0.1.8'`."
    ) from error

_BatchTracer = jax_drift.needed(__name__, "jax._src.interpreters.batching.BatchTracer")
_OP_NAMES = ("dot_general", "einsum", "matmul", "dot", "ragged_dot")
# JAX keeps what it traces by this value: a function that JAX jits, as jnp.tensordot, is traced in a
# converted model and outside it.
_provider = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which products of a model a recipe is for.

    Attributes:
      module_path: a regular expression that the whole path of the calling module must match. A path
        is "decoder/layers_0/attention/query": the attributes or names from the model down.
      recipe: the recipe of these products. None leaves them as the model has them.
      op_names: the functions that the rule is for, of "dot_general", "einsum", "matmul", "dot" and
        "ragged_dot"; none means all. "matmul" is also the operator @.
    Raises:
      TypeError: recipe is no Recipe, and not None; module_path is no str; op_names is a str, or no
        collection.
      ValueError: module_path is no regular expression, or op_names has another name.
    """

    module_path: str = ".*"
    recipe: Recipe | None = DEEPSEEK_V3
    op_names: Collection[str] = ()

    def __post_init__(self) -> None:
        op = "qwix.Rule"
        if self.recipe is not None:
            check_recipe(op, self.recipe)
        path, names = checks.short_repr(self.module_path), checks.short_repr(self.op_names)
        if not isinstance(self.module_path, str):
            hint = "Give a recipe by its name: Rule(recipe=...)."
            raise TypeError(f"{op}: module_path must be a regular expression; got {path}. {hint}")
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise ValueError(
                f"{op}: module_path must be a regular expression; got {path}, {error}"
            ) from error
        # qwix asks for `name in op_names`, which is true of "dot" in "dot_general".
        if isinstance(self.op_names, str) or not isinstance(self.op_names, Collection):
            hint = 'Write op_names=("dot_general",) for one.'
            raise TypeError(
                f"{op}: op_names must be a tuple or a list of names; got {names}. {hint}"
            )
        if not all(name in _OP_NAMES for name in self.op_names):
            raise ValueError(f"{op}: op_names must be of {_OP_NAMES}; got {names}")


class Provider(qwix.QuantizationProvider):
    """Runs the products of weights in FP8: the second argument of qwix.quantize_model.

    The first rule that matches a product decides. A product without a matching rule stays as the
    model has it, and so does each product

    - with batch dimensions, unless an operand has the shape of a parameter of the calling module.
      So attention stays: both operands of its products come from tokens, and batch and heads are
      batch dimensions. Dimensions of jax.vmap that both operands have count as batch dimensions.
    - whose operands or result are not bf16, f16 or f32, or which asks for a precision other than
      None and DEFAULT, or which contracts nothing. Convolutions stay too.

    The converted model has the parameters of the model and no others.

    Args:
      rules: the rules, in the order of precedence. The default is one rule for all products.
      implementation: as for jax_fp8gemm.matmul.
    Raises:
      TypeError: a rule is no Rule.
      ValueError: implementation is wrong.
    """

    def __init__(
        self, rules: Sequence[Rule] = (Rule(),), *, implementation: Implementation = None
    ) -> None:
        checks.check_implementation("qwix.Provider", implementation)
        if not isinstance(rules, Sequence):
            raise TypeError(
                f"qwix.Provider: rules must be a sequence of Rule; got {checks.short_repr(rules)}"
            )
        every_rule: Any = rules  # qwix's own have other fields
        super().__init__(every_rule)
        self._implementation: Implementation = implementation

    def _init_rule(self, rule: Any) -> Any:
        if not isinstance(rule, Rule):
            raise TypeError(
                "qwix.Provider: each rule must be a jax_fp8gemm.qwix.Rule; "
                f"got {checks.short_repr(rule)}"
            )
        return rule

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Returns the names that qwix replaces while the model runs, and what stands for them."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self._dot_general,
            "jax.lax.ragged_dot": self._ragged_dot,
            "jax.numpy.einsum": self._einsum,
            "jax.numpy.dot": self._dot,
            "jax.numpy.matmul": self._matmul,
            "jax.core.Tracer.__matmul__": self._operator,
        }

    def get_interceptors(self) -> Sequence[Callable[[], Any]]:
        """Returns what qwix calls at the start of each run for the names to replace."""
        (make,) = super().get_interceptors()

        def make_for_thread() -> Any:
            name = self._scope_name()
            scope = vars(_thread).setdefault(name, _Scope(self))
            interceptor = make()
            mapping = {**interceptor.mapping, f"{__name__}._thread.{name}.replaced": None}
            return dataclasses.replace(interceptor, mapping=mapping, id=id(scope))

        return [make_for_thread]

    def _scope_name(self) -> str:
        return f"provider_{id(self)}_{threading.get_ident()}"

    def _runner(self, op_name: str, *operands: Any) -> ProductRunner:
        """Returns how the calling module runs this product."""
        rule, _ = self._get_current_rule_and_op_id(op_name, only_rule=True)
        recipe: Recipe | None = getattr(rule, "recipe", None)
        scope: _Scope = vars(_thread)[self._scope_name()]
        if scope.is_in_this_package():
            recipe = None
        is_mapped = sum(isinstance(x, _BatchTracer) for x in operands) > 1
        shapes = frozenset() if recipe is None else _parameter_shapes(get_current_module())
        return ProductRunner(recipe, self._implementation, shapes, is_mapped)

    def _dot_general(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        return self._runner("dot_general", lhs, rhs)(lhs, rhs, *args, **kwargs)

    def _einsum(self, subscripts: Any, *operands: Any, **kwargs: Any) -> jax.Array:
        if kwargs.get("_dot_general") in (None, lax.dot_general):
            kwargs["_dot_general"] = self._runner("einsum", *operands)
        return jnp.einsum(subscripts, *operands, **kwargs)

    def _dot(self, lhs: Any, rhs: Any, **kwargs: Any) -> jax.Array:
        lhs, rhs = _value(lhs), _value(rhs)
        runner = self._runner("dot", lhs, rhs)
        if 0 in (jnp.ndim(lhs), jnp.ndim(rhs)) or not runner.takes(lhs, rhs, **kwargs):
            return jnp.dot(lhs, rhs, **kwargs)
        contracting = (jnp.ndim(lhs) - 1,), (max(jnp.ndim(rhs) - 2, 0),)
        return runner(lhs, rhs, (contracting, ((), ())), **kwargs)

    def _matmul(self, lhs: Any, rhs: Any, **kwargs: Any) -> jax.Array:
        lhs, rhs = _value(lhs), _value(rhs)
        runner = self._runner("matmul", lhs, rhs)
        has_batch = jnp.ndim(lhs) > 2 and jnp.ndim(rhs) > 2
        if runner.takes(lhs, rhs, has_batch=has_batch, **kwargs):
            return matmul(lhs, rhs, **kwargs, **runner.options)
        return jnp.matmul(lhs, rhs, **kwargs)

    def _operator(self, lhs: Any, rhs: Any) -> Any:
        if isinstance(_value(rhs), jax.Array | np.ndarray):
            return self._matmul(lhs, rhs)
        return jax.core.Tracer.__matmul__(lhs, rhs)  # pyright: ignore[reportAttributeAccessIssue]

    def _ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        lhs, rhs = _value(lhs), _value(rhs)
        runner = self._runner("ragged_dot")
        # args begin with precision and preferred_element_type, for lax's function and for ours.
        if runner.takes(lhs, rhs, *args[:2], **kwargs):
            return ragged_dot(lhs, rhs, group_sizes, *args, **kwargs, **runner.options)
        return lax.ragged_dot(lhs, rhs, group_sizes, *args, **kwargs)


class _Scope:
    """Says to JAX, in one thread, that it traces inside a converted model.

    qwix assigns to `replaced` when the outermost method of the model begins, as to all names that
    it replaces, and assigns the old value, None, when the method ends or raises.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._entered: Any = None
        self._num_frames = 0  # of this package, around the model

    @property
    def replaced(self) -> None:
        return None

    @replaced.setter
    def replaced(self, function: Any) -> None:
        if function is not None:
            self._num_frames = _count_frames()
            self._entered = _provider(self._provider)
            self._entered.__enter__()
        else:
            self._entered.__exit__(None, None, None)

    def is_in_this_package(self) -> bool:
        """Returns whether a function of this package runs, which the model called.

        Such a function has a recipe of its own. It may also be the reference, as JAX compiles it.
        Functions that run the model, such as `explain`, do not count.
        """
        return _count_frames() > self._num_frames


# Of each thread, its scopes: two threads may run one model at a time.
_thread = threading.local()


def _count_frames() -> int:
    """Returns the calls of this package's functions, but for this module's, on the stack."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        count += name.startswith("jax_fp8gemm.") and name != __name__
        frame = frame.f_back
    return count


def _parameter_shapes(module: Any) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of the parameters that the module itself has, not its children."""
    if isinstance(module, linen.Module):
        own = module.variables.get("params", {}).values()
        leaves = jax.tree.leaves([x for x in own if not isinstance(x, Mapping)])
    else:
        leaves = [x for x in vars(module).values() if isinstance(x, nnx.Param)]
    return frozenset(jnp.shape(_value(x)) for x in leaves)


def _value(x: Any) -> Any:
    """Returns the array of a flax variable, and other operands as they are."""
    return x.get_value() if isinstance(x, nnx.Variable) else x
