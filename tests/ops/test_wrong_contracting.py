"""The hint of a product whose QuantizedWeight has other contracting dimensions: it works."""

import ast
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jax_fp8gemm import dot_general, einsum, matmul, quantize_weight, ragged_dot

ones = partial(jnp.ones, dtype=jnp.bfloat16)
SIZES = jnp.asarray((3, 5), jnp.int32)


def contract(lhs, rhs, batch=((), ())):
    return lambda x, w: dot_general(x, w, ((lhs, rhs), batch))


# (product, shape of x, shape of w, contracting that is wrong, hint)
PRODUCTS = [
    (partial(einsum, "bd,dnh->bnh"), (8, 24), (24, 4, 6), None, "contracting=0"),
    (partial(einsum, "bnh,nhd->bd"), (8, 4, 6), (4, 6, 24), None, "contracting=(0, 1)"),
    (partial(einsum, "bnh,nhd->bd"), (8, 4, 6), (4, 6, 24), -2, "contracting=(0, 1)"),
    (partial(einsum, "bd,nhd->bnh"), (8, 24), (4, 6, 24), (1, 2), "contracting=2"),
    (partial(einsum, "gbd,gdn->gbn"), (2, 8, 24), (2, 24, 6), (0, 1), ""),
    (partial(einsum, "gbd,gnd->gbn"), (2, 8, 24), (2, 6, 24), 2, ""),
    (partial(einsum, "gbd,gdnh->gbnh"), (2, 8, 24), (2, 24, 4, 6), None, "contracting=0"),
    (contract((1,), (0,)), (8, 24), (24, 4, 6), None, "contracting=0"),
    (contract((1, 2), (1, 0)), (8, 4, 6), (6, 4, 24), (0, 1), "contracting=(1, 0)"),
    (contract((1, 2), (0, 1)), (8, 4, 6), (4, 6, 24), -2, "contracting=(0, 1)"),
    (matmul, (8, 24), (24, 6), 1, ""),
    (matmul, (2, 8, 24), (2, 24, 6), 1, ""),
    (partial(ragged_dot, group_sizes=SIZES), (8, 24), (2, 24, 6), (0, 1), ""),
]


def quantised_as_told(w, message):
    """Returns `w` quantised as the last sentence of `message` tells."""
    mapped = re.search(r"Map quantize_weight with contracting=(.*) over .* by jax.vmap\.$", message)
    if mapped:
        return jax.vmap(partial(quantize_weight, contracting=ast.literal_eval(mapped[1])))(w)
    plain = re.search(r"Quantise with quantize_weight\(rhs(?:, contracting=(.*))?\)\.$", message)
    assert plain, message
    return quantize_weight(w, contracting=plain[1] and ast.literal_eval(plain[1]))


@pytest.mark.parametrize(("product", "x_shape", "w_shape", "contracting", "hint"), PRODUCTS)
def test_the_hint_can_be_followed(product, x_shape, w_shape, contracting, hint):
    x, w = ones(x_shape), ones(w_shape)
    op = getattr(product, "func", product).__name__.replace("<lambda>", "dot_general")
    with pytest.raises(ValueError, match=f"^{op}: rhs must be quantised as the mat") as error:
        product(x, quantize_weight(w, contracting=contracting))
    assert hint in str(error.value)
    assert product(x, quantised_as_told(w, str(error.value))).shape == product(x, w).shape


@pytest.mark.parametrize(
    ("product", "x_shape", "w_shape"),
    [
        (partial(einsum, "b,dn->bdn"), (8,), (24, 6)),
        (partial(einsum, "bdn,dn->b"), (8, 24, 6), (24, 6)),
        (partial(einsum, "gbd,dgn->gbn"), (2, 8, 24), (24, 2, 6)),
    ],
    ids=["no contraction", "no free dimension", "a batch that does not lead"],
)
def test_where_no_quantisation_fits(product, x_shape, w_shape):
    x, w = ones(x_shape), quantize_weight(ones(w_shape))
    with pytest.raises(ValueError, match="No quantisation fits this product: pass its weight.$"):
        product(x, w)
    assert product(x, w.weight).shape == jax.eval_shape(product, x, w.weight).shape
