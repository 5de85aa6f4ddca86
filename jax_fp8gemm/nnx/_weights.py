"""quantize_weights: quantises the weights of a model in Flax NNX once, for many calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.quantized_weight import QuantizedWeight
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, DTYPES
from jax_fp8gemm._data.scaled_array import ScaledArray
from jax_fp8gemm._ops.product_spec import check_recipe
from jax_fp8gemm._ops.quantize import quantize
from jax_fp8gemm._ops.quantize_weight import quantize_weight
from jax_fp8gemm._runtime.warn import warn_caller
from jax_fp8gemm.nnx._scopes import scope_of

Path = tuple[Any, ...]  # attributes and indices, from the model down


class Weights(NamedTuple):
    """How the products of a module read its weights.

    Attributes:
      names: the attributes that hold them.
      how: the recipe and the implementation of the module.
      contracting: as for quantize_weight.
      num_batch: the number of dimensions in front, with a product for each element.
      dtype: that to which the module casts them before, or None.
      ndim: of a weight of one module. A weight of more dimensions is a stack of those of several
        modules, as nnx.vmap makes it. None where all leading dimensions are alike.
    """

    names: tuple[str, ...]
    how: dict[str, Any]
    contracting: tuple[int, ...] | None = None
    num_batch: int = 0
    dtype: Any = None
    ndim: int | None = None

    def num_mapped(self, w: Any) -> int:
        """Returns the number of leading dimensions of `w` that contracting does not count."""
        return self.num_batch + (0 if self.ndim is None else w.ndim - self.ndim)


def quantize_weights(model: nnx.Module, *, for_inference: bool = False) -> None:
    """Quantises the weights of this package's modules in `model` once, in place.

    By default each becomes a QuantizedWeight, by the recipe of its module. Calls then have the same
    bits, and quantise no weight. Where a module casts its kernel to its `dtype`, the weight is cast
    here, and gradients have that dtype. Modules that nnx.vmap has stacked along dimension 0, for
    nnx.scan, are quantised as a stack. Modules of Flax itself stay as they are, with a UserWarning
    if the model has no others. So does an Einsum whose result is transposed, where the kernel may
    not be the rhs of the product; a kernel that a module which reads unquantised weights holds too,
    such as nnx.Embed; and what nnx.WeightNorm or nnx.SpectralNorm normalises in each call.

    An optimiser must have the model from before, and `master_weights` of the gradients: it would
    not quantise what it changes. Once for all micro-batches::

        def gradients(params, batches):  # of a model = nnx.merge(graph, params)
            model = nnx.merge(graph, params)
            quantize_weights(model)
            _, weights = nnx.split(model)

            def add(total, batch):
                grads = master_weights(jax.grad(loss)(weights, batch))
                return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), None

            return jax.lax.scan(add, zeros, batches)[0]

    Args:
      model: a module, which may hold others.
      for_inference: whether each becomes a ScaledArray of 1 byte a weight, without the weight
        itself. Calls have the same bits where x has the dtype of the weights, or the module has a
        `dtype`; otherwise a weight no longer takes part in the promotion of dtypes. The weights
        have no gradient, and x has one. A kernel that is no matrix (k, n) or stack of such stays as
        it is: of LinearGeneral with several axes or features, and of Einsum.
    Raises:
      TypeError: a weight is a ScaledArray, without for_inference. It names the module by its path,
        and no weight is changed.
    """
    modules = _modules(model)
    if not for_inference:
        for path, module, found in modules:
            _check_has_weights(path, module, found)
    readers = {
        (id(module), name): (module, found)
        for _, module, found in modules
        for name in found.names
        if not for_inference or _is_matrices(module, getattr(module, name)[...], found)
    }
    kept = _kept_variables(model, readers)
    for (_, name), (module, found) in readers.items():
        variable = getattr(module, name)
        if id(variable) in kept:
            continue
        with scope_of(module):
            if not for_inference:
                variable.set_value(_quantised(variable[...], found))
            elif not isinstance(variable[...], ScaledArray):  # one that two modules hold
                variable.set_value(_for_inference(variable[...], found))


def _modules(model: nnx.Module) -> list[tuple[Path, Any, Weights]]:
    """Returns this package's modules in `model` that have weights to quantise."""
    found: list[Any] = [x for x in nnx.iter_modules(model) if hasattr(x[1], "weights_of_products")]
    if not found:
        warn_caller(
            f"quantize_weights: model must hold modules of jax_fp8gemm.nnx; got {_kind(model)} "
            "without any, and changed nothing. Modules of Flax itself stay as they are, also with "
            "dot_general=jax_fp8gemm.dot_general: use jax_fp8gemm.nnx.Linear.",
            UserWarning,
        )
    read = [(path, module, module.weights_of_products()) for path, module in found]
    return [(path, module, weights) for path, module, weights in read if weights is not None]


def _kept_variables(model: nnx.Module, readers: Collection[tuple[int, str]]) -> set[int]:
    """Returns the ids of the Variables in `model` that a module reads which is not in `readers`.

    readers: the id of each module whose product takes a quantised weight, with its attribute.
    """
    kept: set[int] = set()
    for _, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Variable) and (id(module), name) not in readers:
                kept.add(id(value))
        if isinstance(module, nnx.WeightNorm | nnx.SpectralNorm):
            variables = jax.tree.leaves(nnx.state(module), is_leaf=_is_variable)
            kept |= {id(variable) for variable in variables}
    return kept


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def _kind(model: object) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _check_has_weights(path: Path, module: Any, found: Weights) -> None:
    """Raises TypeError where a weight of the module is quantised without the weight itself."""
    for name in found.names:
        if isinstance(w := getattr(module, name)[...], ScaledArray):
            raise TypeError(
                f"quantize_weights: {'/'.join(map(str, (*path, name)))} must be an array or a "
                f"QuantizedWeight; got a ScaledArray {checks.short_type(w)}, as for_inference=True "
                "makes it, which has no gradient. Load the unquantised weights again, or keep them "
                "with nnx.clone(model) before for_inference=True."
            )


def _quantised(w: Any, weights: Weights) -> QuantizedWeight:
    if isinstance(w, QuantizedWeight):
        return w
    run: Callable[..., Any] = partial(
        quantize_weight, contracting=weights.contracting, **weights.how
    )
    for _ in range(weights.num_mapped(w)):
        run = jax.vmap(run)
    return run(w if weights.dtype is None else w.astype(weights.dtype))


def _is_matrices(module: nnx.Module, w: Any, weights: Weights) -> bool:
    """Returns whether the products of the module read `w` as matrices (..., k, n)."""
    if isinstance(w, ScaledArray) or isinstance(module, nnx.Einsum) or weights.num_batch:
        return False
    return weights.contracting is None or (weights.ndim, weights.contracting) == (2, (0,))


def _for_inference(w: Any, weights: Weights) -> Any:
    recipe = check_recipe("quantize_weights", weights.how.get("recipe", DEEPSEEK_V3))
    if recipe.fwd is None:
        return w
    w = w.weight if isinstance(w, QuantizedWeight) else w
    return quantize(
        w if weights.dtype is None else w.astype(weights.dtype),
        block=recipe.rhs_block,
        dtype=DTYPES[recipe.fwd],
        pow2_scale=recipe.pow2_scale,
        with_transpose="only",
        implementation=weights.how.get("implementation"),
    )


def weights_of_einsum(equation: str, how: dict[str, Any], dtype: Any) -> Weights | None:
    """Returns how an Einsum reads its kernel; None where it is not the rhs of its product."""
    inputs, out = equation.replace(" ", "").split("->")
    lhs, rhs = inputs.split(",")
    batch = "".join(name for name in rhs if name in lhs and name in out)
    free = ["".join(n for n in names if n in out and n not in batch) for names in (lhs, rhs)]
    # For a result in another order jnp.einsum may swap the operands.
    if not rhs.startswith(batch) or out != "".join((batch, *free)):
        return None
    # jnp.einsum contracts in the order of the letters.
    contracting = tuple(rhs.index(n) - len(batch) for n in sorted(rhs) if n not in out)
    return Weights(("kernel",), how, contracting, len(batch), dtype, len(rhs))
