"""The suites: whose tests, which of them, and what is put in place of what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Cases whose source text names a product.
PRODUCTS = r"matmul|einsum|dot_general|ragged_dot|tensordot|\bdot\(| @ "


@dataclass(frozen=True)
class Suite:
    """Test files of one project, run in one process.

    Attributes:
      source: where `files` are: "jax", a checkout; "flax", its source distribution; "here".
      tests: regular expression of the names of the tests to run.
      contains: regular expression that the source text of a test must match, too.
      modules: of the project itself, in which ours are put in place: where tests call layers.
      takes_integers: products of integers go through f32. In suites that are not about dtypes.
      largest: of the exact integers. 1 where products are multiplied again; 7 where a test has the
        result for its own data, which are such integers, as numbers.
      num_combinations: of shapes and dtypes that JAX draws from those that a test describes.
      is_exact: generators and arange of a test give what FP8 holds exactly. Else its data stay.
    """

    source: str
    files: Sequence[str]
    tests: str = ""
    contains: str = ""
    modules: Sequence[str] = ()
    takes_integers: bool = False
    is_exact: bool = True
    largest: int = 4
    num_combinations: int = 60


LINEN = ("flax.linen.linear", "flax.linen.attention")
NNX = ("flax.nnx.nn.linear", "flax.nnx.nn.attention")

SUITES = {
    "jax-dot": Suite("jax", ["lax_test.py"], tests="^(?!test_ragged).*[dD]ot"),
    "jax-ragged": Suite("jax", ["lax_test.py"], tests="^test_ragged_dot"),
    "jax-numpy": Suite(
        "jax", ["lax_numpy_test.py"], tests="Dot|Matmul|Tensordot", contains=r"jnp\.(dot|matmul|t)"
    ),
    "jax-einsum": Suite("jax", ["lax_numpy_einsum_test.py"], largest=1),
    "jax-vmap": Suite("jax", ["lax_vmap_test.py", "batching_test.py"], tests="Dot"),
    "jax-sharding": Suite(
        "jax", ["pjit_test.py"], contains=PRODUCTS, takes_integers=True, largest=7
    ),
    "jax-shard-map": Suite(
        "jax",
        ["shard_map_test.py"],
        contains=PRODUCTS,
        takes_integers=True,
        largest=7,
        num_combinations=8,  # half a minute each
    ),
    "flax-linen": Suite(
        "flax",
        ["linen/linen_linear_test.py", "linen/linen_attention_test.py"],
        modules=LINEN,
        is_exact=False,
    ),
    "flax-nnx": Suite(
        "flax",
        ["nnx/nn/linear_test.py", "nnx/nn/attention_test.py"],
        modules=LINEN + NNX,
        is_exact=False,
    ),
    "tokamax": Suite("here", ["tokamax_cases.py"]),
    "maxtext": Suite("here", ["maxtext_cases.py"]),
}
