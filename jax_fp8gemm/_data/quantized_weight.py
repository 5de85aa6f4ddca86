"""QuantizedWeight: a weight beside its quantisation, for many products with one gradient."""

# JAX leaves parameters of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

from jax_fp8gemm._data import checks
from jax_fp8gemm._data.methods import method
from jax_fp8gemm._data.recipe import DEEPSEEK_V3, Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray
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
    pytree, so jit, vmap (over leading dimensions), scan, remat and shardings take it. Its gradient
    is a QuantizedWeight whose `weight` is the gradient of the weight, in the dtype of the weight,
    and whose `scaled` is zero. jax_fp8gemm.master_weights takes the former out of a whole tree.

    NOTE: an optimiser must be given the master weights and such gradients. It would update `weight`
    of a QuantizedWeight and leave `scaled`, which products read, so the model would not change.

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

    def __rmatmul__(self, lhs: Any) -> Any:
        """Returns jax_fp8gemm.matmul(lhs, self), by the recipe that the weight is quantised by."""
        return method("matmul")(lhs, self, recipe=self.recipe)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Raises TypeError; without it NumPy would make an array with one object."""
        raise TypeError(
            "QuantizedWeight: its weight must stand for it where NumPy or JAX read an array of "
            f"numbers; got {checks.short_type(self)}. Use .weight."
        )

    def __getitem__(self, index: Any) -> QuantizedWeight:
        """Returns itself for an ellipsis, as w[...] reads the value of a Variable of Flax."""
        if index is Ellipsis:
            return self
        raise IndexError(
            f"QuantizedWeight: index must be an ellipsis; got {checks.short_repr(index)}. Index "
            "the weight before quantize_weight, or map a function over leading dimensions."
        )

    def __iter__(self) -> NoReturn:
        """Raises TypeError; without it Python would iterate by __getitem__, over nothing."""
        raise TypeError(
            "QuantizedWeight: it cannot be iterated over; "
            f"got {checks.short_type(self)}. Map a function over leading dimensions with "
            "jax.lax.scan or jax.vmap, or iterate over .weight before quantize_weight."
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
    """Returns promote(args), a tuple, where each QuantizedWeight is promoted as its weight is.

    A ScaledArray stays as it is, and the others are promoted without it.
    """
    promoted = iter(promote([_weight_of(x) for x in args if not isinstance(x, ScaledArray)]))

    def of(x: Any) -> Any:
        if isinstance(x, ScaledArray):
            return x
        y = next(promoted)
        return replace(x, weight=y) if isinstance(x, QuantizedWeight) else y

    return tuple(map(of, args))


def _is_quantized_weight(x: object) -> bool:
    return isinstance(x, QuantizedWeight)


def _weight_of(x: object) -> object:
    return x.weight if isinstance(x, QuantizedWeight) else x
