"""QuantizedWeight: a weight beside its quantisation, for many products with one gradient."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data import checks, formats
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, DTYPES, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray, check_scaled_array
from jax_fp8gemm._runtime import jax_drift

if TYPE_CHECKING:
    from jaxtyping import Array, Float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "scaled"],
    meta_fields=["recipe", "contracting"],
)
@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight and its quantisation. Products read the latter, and the former has the gradient.

    jax_fp8gemm.quantize_weight makes it. The products of this package take it as their rhs, and
    have the same bits as for the weight alone, which they would quantise on each call. It is a
    pytree, so jit, vmap (over leading dimensions), scan, remat, shardings and optimisers take it.
    Its gradient is a QuantizedWeight whose `weight` is the gradient of the weight, in the dtype of
    the weight, and whose `scaled` is zero. jax_fp8gemm.master_weights takes the former out of a
    whole tree.

    The constructor checks nothing, because a pytree may hold anything in the place of its leaves.
    An op checks the quantisation when it takes one: its shape, its format and `recipe`. It cannot
    check the values. A quantisation of other values gives the products of those.

    Attributes:
      weight: bf16, f16 or f32, the master weight.
      scaled: the quantisation with block (128, 128), both ways, of the matrix (..., k, n) that the
        weight is when its contracting dimensions are folded into k and the others into n. None
        where the recipe quantises nothing.
      recipe: the recipe that it was quantised by; static.
      contracting: the contracting dimensions, counted from the end, as (-2,); static.
    """

    weight: Float[Array, ...]
    scaled: ScaledArray | None
    recipe: Recipe = DEEPSEEK_V3
    contracting: tuple[int, ...] = (-2,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Returns the dtype of the weight."""
        return self.weight.dtype

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the weight."""
        return self.weight.ndim

    @property
    def free(self) -> tuple[int, ...]:
        """Returns the dimensions that are folded into n, counted from the end."""
        num_batch = 0 if self.scaled is None else self.scaled.ndim - 2
        dims = range(num_batch - self.ndim, 0)
        return tuple(d for d in dims if d not in self.contracting)

    def astype(self, dtype: DTypeLike) -> QuantizedWeight:
        """Returns it with the weight in `dtype`. The quantisation stays as it is.

        Results and gradients of products then have the dtypes that they have for such a weight.
        """
        return replace(self, weight=self.weight.astype(dtype))

    # NumPy's arrays then leave x @ w to __rmatmul__.
    __array_ufunc__ = None

    def __getitem__(self, index: Any) -> QuantizedWeight:
        """Returns itself for an ellipsis, as w[...] reads the value of a Variable of Flax."""
        if index is Ellipsis:
            return self
        raise IndexError(
            f"QuantizedWeight: index must be an ellipsis; got {checks.short_repr(index)}. Index "
            "the weight before quantize_weight, or map a function over leading dimensions."
        )

    def __repr__(self) -> str:
        weight = checks.short_type(self.weight)
        return f"QuantizedWeight({weight}, {self.scaled!r}, {self.recipe!r}, {self.contracting})"


# NOTE: as for ScaledArray, whose module says why the name is dropped first.
_registered = jax_drift.optional("jax._src.export._export.deserialization_registry", {})
_registered.pop("jax_fp8gemm.QuantizedWeight", None)
jax.export.register_pytree_node_serialization(
    QuantizedWeight,
    serialized_name="jax_fp8gemm.QuantizedWeight",
    serialize_auxdata=lambda static: json.dumps([asdict(static[0]), static[1]]).encode(),
    deserialize_auxdata=lambda text: _static_of(*json.loads(bytes(text))),
)


def _static_of(
    recipe: dict[str, Any], contracting: Sequence[int]
) -> tuple[Recipe, tuple[int, ...]]:
    # JSON has lists for the tuples of scale blocks.
    fields: dict[str, Any] = {k: tuple(v) if k.endswith("_block") else v for k, v in recipe.items()}
    return Recipe(**fields), tuple(contracting)


def master_weights(tree: Any) -> Any:
    """Returns `tree` with the weight of each QuantizedWeight in its place.

    Of a tree of parameters these are the master weights; of the gradients with respect to such a
    tree they are those with respect to the master weights, as an optimiser takes them.
    """
    return jax.tree.map(_weight_of, tree, is_leaf=_is_quantized_weight)


def promote_weights(promote: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Any:
    """Returns promote(args), a tuple, where each QuantizedWeight is promoted as its weight is."""
    promoted = promote([_weight_of(x) for x in args])
    is_pair = [isinstance(x, QuantizedWeight) for x in args]
    return tuple(
        replace(x, weight=y) if pair else y
        for x, y, pair in zip(args, promoted, is_pair, strict=True)
    )


def _is_quantized_weight(x: object) -> bool:
    return isinstance(x, QuantizedWeight)


def _weight_of(x: object) -> object:
    return x.weight if isinstance(x, QuantizedWeight) else x


def check_quantized_weight(op: str, name: str, w: QuantizedWeight) -> None:
    """Raises with a sentence if `w` breaks the invariants of a QuantizedWeight."""
    weight = checks.check_array(op, f"{name}.weight", w.weight)
    checks.check_dtype(op, f"{name}.weight", weight, formats.FLOAT_DTYPES)
    _check_static(op, name, w.recipe, w.contracting)
    if w.scaled is None:
        return
    check_scaled_array(op, f"{name}.scaled", w.scaled)
    has_dims = all(-w.ndim <= d for d in w.contracting) and w.scaled.ndim - 2 <= w.ndim
    expected = folded_shape(w) if has_dims else ()
    if w.scaled.block != (128, 128) or w.scaled.shape != expected:
        raise ValueError(
            f"{op}: {name}.scaled must be the quantisation of {name}.weight with block (128, 128), "
            f"{list(expected)}; got {name}.weight {checks.short_type(weight)}, {name}.scaled "
            f"{checks.short_type(w.scaled)} with block {w.scaled.block}. Quantise again with "
            f"quantize_weight({name}.weight)."
        )


def _check_static(op: str, name: str, recipe: Any, contracting: Any) -> None:
    dims = cast(tuple[Any, ...], contracting) if isinstance(contracting, tuple) else ()
    is_from_end = all(isinstance(d, int) and d < 0 for d in dims)
    if not isinstance(recipe, Recipe) or not dims or not is_from_end:
        raise TypeError(
            f"{op}: {name}.recipe must be a Recipe, and {name}.contracting a tuple of dimensions "
            f"below 0; got {checks.short_repr(recipe)}, {checks.short_repr(contracting)}. Make "
            f"{name} with quantize_weight."
        )


def folded_shape(w: QuantizedWeight) -> tuple[int, ...]:
    """Returns the shape (..., k, n) of the matrix that `w` stands for."""
    num_batch = w.ndim - len(w.contracting) - len(w.free)
    k, n = (math.prod(w.shape[d] for d in dims) for dims in (w.contracting, w.free))
    return (*w.shape[:num_batch], k, n)


def check_quantised_by(op: str, w: QuantizedWeight, recipe: Recipe) -> None:
    """Raises ValueError unless `w` is quantised as products of `recipe` quantise a weight."""
    if not recipe.is_fp8:
        return
    fields = ("fwd", "rhs_block", "pow2_scale")
    is_alike = all(getattr(w.recipe, name) == getattr(recipe, name) for name in fields)
    has_format = w.scaled is not None and w.scaled.dtype == DTYPES[recipe.fwd or "e4m3"]
    if not is_alike or not has_format:
        stored = "nothing" if w.scaled is None else checks.short_type(w.scaled)
        raise ValueError(
            f"{op}: a QuantizedWeight must be quantised as the recipe says, {recipe!r}; got one "
            f"that holds {stored}, by {w.recipe!r}. Quantise with quantize_weight(w, recipe=...), "
            "or pass its weight."
        )
