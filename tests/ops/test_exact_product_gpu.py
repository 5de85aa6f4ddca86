"""Products in integers on a GPU: the bits of NumPy, whatever kernel cuBLAS takes for a batch."""

import jax
import numpy as np
import pytest
import reference
from test_exact_product import BF16, draw, matmul, model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(2048, 256), (7168, 256), (512, 4096), (300, 20)], ids=str)
def test_products_have_the_bits_of_the_model_in_any_batch(shape):
    k, n = shape
    rng = np.random.default_rng(0)
    lhs, rhs = draw(rng, (4096, k), BF16), draw(rng, (k, n))
    rows = np.asarray([0, 1, 16, 200, 332, 4095])
    expected = model(lhs[rows], rhs)
    run = jax.jit(matmul)
    for m in (1, 17, 333, 4096):
        out, is_there = run(lhs[:m], rhs), rows < m
        reference.assert_same_bits(np.asarray(out)[rows[is_there]], expected[is_there], str(m))
