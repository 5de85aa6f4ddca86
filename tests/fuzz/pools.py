"""What random calls are made of: arrays, options, and things that are no arguments."""

import decimal
import fractions
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.lax import DotAlgorithmPreset, RaggedDotDimensionNumbers
from jax.sharding import PartitionSpec

import jax_fp8gemm as fp8

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
# Others that an array may have: some ops take some of them.
DTYPES = (
    *(np.int8, np.uint8, np.int32, np.int64, np.bool_, np.float64, np.complex64),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.int4),
    *(">f4", ">i4", "S3", object, [("a", "f4")], "M8[s]"),
)
EXTENTS = (0, 1, 2, 3, 8, 127, 128, 130, 2**31)


class Held:
    """As flax.nnx.Param: not an array, but its value."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def struct(shape, dtype):
    """An array that is not there. An extent of any size costs nothing."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def numpy_array(shape, dtype):
    """Of JAX's dtypes or of others; one element, repeated, so that any extent costs little."""
    return np.broadcast_to(np.zeros((), np.dtype(dtype)), tuple(min(d, 1000) for d in shape))


def quantised(shape, block=(1, 128), dtype=jnp.float8_e4m3fn, with_transpose=False):
    *batch, r, c = shape
    scale = (*batch, r if block[0] == 1 else -(-r // 128), -(-c // 128))
    transposed = struct((*batch, c, r), dtype) if with_transpose else None
    return fp8.ScaledArray(struct(shape, dtype), struct(scale, jnp.float32), transposed, block)


def no_arrays():
    """Things that a caller might pass by mistake for any argument."""
    key = jax.random.key(0)
    return (
        *(None, True, 0, -1, 2, 1.5, math.nan, math.inf, 2**31, 2**63, 10**400, -(10**400), 1j),
        *("", "x", "cuda", "highest", "e4m3", ",", "f4,f4", b"f4", "\n", "x" * 1000),
        *((), (1,), (128, 128), (1, 128), [1.0], [[1.0, 2.0]], {}, {"a": 1}, {1}, range(2)),
        *(np, math, jnp, key, key.dtype, object(), object, len, lambda x: x, ...),
        *(
            np.float64(1),
            np.int8(3),
            np.bool_(1),
            np.dtype("f4"),
            np.datetime64(0, "s"),
            float,
            int,
        ),
        *(fractions.Fraction(10**400, 3), decimal.Decimal(2), memoryview(b"abcd"), slice(3)),
        *(np.ma.ones((2, 2)), np.array("text"), np.array([None, 1]), np.ones((2, 3), ">f4")),
        *(jnp.ones(()), jnp.ones(3), jnp.ones((2, 2), jnp.int32), struct((2, 2), jnp.float32)),
        *(Held(np.ones((2, 2), np.float32)), Held(None), Held("x"), fp8.BF16, fp8.Recipe),
        *(fp8.ScaledArray(np, np), fp8.ScaledArray(key, key), fp8.ScaledArray(None, None)),
        fp8.ScaledArray(jnp.ones((2, 2)), jnp.ones((2, 1))),
        fp8.ScaledArray(np.ones((2, 2), ml_dtypes.float8_e4m3fn), 1.0, None, "block"),
        *(PartitionSpec(), PartitionSpec("x"), DotAlgorithmPreset.F64_F64_F64, jax.devices()[0]),
        *(RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []), jax.sharding.Mesh),
        np.asarray([jax.devices()[0]]),
    )


RECIPES = (
    *(fp8.DEEPSEEK_V3, fp8.HYBRID, fp8.BF16, fp8.Recipe(wgrad="bf16"), fp8.Recipe(fwd="e5m2")),
    *(fp8.Recipe(pow2_scale=True), fp8.Recipe(reduce_dtype="bf16"), fp8.Recipe(fp8_combine=True)),
    fp8.Recipe(wgrad_lhs_block=(128, 128)),
    fp8.Recipe(kept_gate_up="fp8"),
)
OPTIONS = {
    "recipe": RECIPES,
    "precision": (
        *(None, "default", "highest", "high", ("default", "highest"), jax.lax.Precision.DEFAULT),
        *(DotAlgorithmPreset.BF16_BF16_F32, DotAlgorithmPreset.DEFAULT),
    ),
    "preferred_element_type": (None, *FLOATS, float, "float16"),
    "implementation": (None, "xla"),
    "out_sharding": (None,),
    "dtype": (jnp.float8_e4m3fn, jnp.float8_e5m2),
    "out_dtype": (jnp.float32, jnp.bfloat16),
    "pow2_scale": (True, False),
    "normalize": (True, False),
    "scoring": ("softmax", "sigmoid", "sqrtsoftplus"),
    "scale": (1.0, 2.5),
    "return_load": (True, False),
    "capacity_factor": (None, 1.0, 2, math.inf),
}
