"""jax_fp8gemm.maxtext in MaxText's own dense layer. MaxText is in the extra `conformance`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import jax_fp8gemm as fp8

pytest.importorskip("flax", reason="flax is installed with the extra `test`")
from flax import linen  # noqa: E402

from jax_fp8gemm.maxtext import Quantization  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = jax.random.normal(jax.random.key(0), (2, 8, 32), jnp.bfloat16)
W = jax.random.normal(jax.random.key(1), (32, 48), jnp.bfloat16)


def test_dot_general_cls():
    """Called as MaxText's linen layers call it: inside a compact module, with no parameters."""

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            dot_general = Quantization(fp8.HYBRID).dot_general_cls(mesh_axes=("embed", "mlp"))()
            return dot_general(x, W, (((2,), (0,)), ((), ())), precision=None)

    found, variables = jax.jit(lambda x: Dense().init_with_output(jax.random.key(0), x))(X)
    assert variables == {}
    np.testing.assert_array_equal(found, jax.jit(lambda x: fp8.matmul(x, W, recipe=fp8.HYBRID))(X))


def test_einsum():
    einsum = Quantization().einsum(mesh_axes=())
    run = lambda x: einsum("bsm,mh->bsh", x, W)
    assert str(jax.make_jaxpr(run)(X)).count("= jax_fp8gemm_gemm[") == 1
    # jnp.einsum keeps what it traces by the function it gets.
    assert Quantization().einsum(jnp.bfloat16) is einsum


def test_wrong_arguments():
    with raises(TypeError, match="^maxtext.Quantization: recipe must be a jax_fp8gemm.Recipe"):
        Quantization("fp8")
    with raises(ValueError, match="^maxtext.Quantization: implementation must be"):
        Quantization(implementation="triton")


def test_the_dense_layer_of_maxtext():
    linears = pytest.importorskip(
        "maxtext.layers.linears", reason="MaxText is installed with the extra `conformance`"
    )
    from flax import nnx

    def layer(quant):
        return linears.DenseGeneral(
            in_features_shape=32,
            out_features_shape=48,
            dtype=jnp.bfloat16,
            kernel_axes=("embed", "mlp"),
            quant=quant,
            rngs=nnx.Rngs(0),
        )

    plain, ours = layer(None), layer(Quantization())
    paths = lambda layer: [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))]
    assert paths(ours) == paths(plain)
    kernel = plain.kernel.get_value().astype(jnp.bfloat16)
    np.testing.assert_array_equal(ours(X), fp8.matmul(X, kernel))
