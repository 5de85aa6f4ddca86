"""FP8 matrix multiplication with fine-grained scaling on Hopper GPUs, for JAX.

The modules checkpoint, linen, maxtext, nnx, qwix and tokamax are imported where they are first
used, because most of them need other packages.
"""

import importlib as _importlib
import typing as _typing

from jax_fp8gemm._runtime import jax_drift as _jax_drift  # noqa: F401 (first: says which JAX is needed)

# isort: split
from jax_fp8gemm import checkpoint_policies as checkpoint_policies
from jax_fp8gemm import moe as moe
from jax_fp8gemm import stats as stats
from jax_fp8gemm._data.dequantize import dequantize as dequantize
from jax_fp8gemm._data.quantized_weight import QuantizedWeight as QuantizedWeight
from jax_fp8gemm._data.quantized_weight import master_weights as master_weights
from jax_fp8gemm._data.recipe import BF16 as BF16
from jax_fp8gemm._data.recipe import DEEPSEEK_V3 as DEEPSEEK_V3
from jax_fp8gemm._data.recipe import HYBRID as HYBRID
from jax_fp8gemm._data.recipe import Recipe as Recipe
from jax_fp8gemm._data.scaled_array import ScaledArray as ScaledArray
from jax_fp8gemm._data.scaled_parts import concatenate as concatenate
from jax_fp8gemm._data.scaled_parts import stack as stack
from jax_fp8gemm._inspect.explain import Explanation as Explanation
from jax_fp8gemm._inspect.explain import explain as explain
from jax_fp8gemm._ops.dot_general import dot_general as dot_general
from jax_fp8gemm._ops.einsum import einsum as einsum
from jax_fp8gemm._ops.matmul import matmul as matmul
from jax_fp8gemm._ops.product_spec import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from jax_fp8gemm._ops.quantize import quantize as quantize
from jax_fp8gemm._ops.quantize import quantize_both as quantize_both
from jax_fp8gemm._ops.quantize_ragged import quantize_ragged as quantize_ragged
from jax_fp8gemm._ops.quantize_weight import quantize_weight as quantize_weight
from jax_fp8gemm._ops.ragged_dot import ragged_dot as ragged_dot
from jax_fp8gemm._ops.ragged_dot_general import ragged_dot_general as ragged_dot_general
from jax_fp8gemm._ops.scaled_matmul import scaled_matmul as scaled_matmul
from jax_fp8gemm._ops.scaled_ragged_dot import scaled_ragged_dot as scaled_ragged_dot
from jax_fp8gemm._ops.scaled_ragged_wgrad import scaled_ragged_wgrad as scaled_ragged_wgrad
from jax_fp8gemm._runtime.backend_info import BackendInfo as BackendInfo
from jax_fp8gemm._runtime.backend_info import backend_info as backend_info
from jax_fp8gemm._runtime.extension import EXPORT_CHECKS as EXPORT_CHECKS
from jax_fp8gemm._runtime.extension import FallbackWarning as FallbackWarning

if _typing.TYPE_CHECKING:
    from jax_fp8gemm import checkpoint as checkpoint
    from jax_fp8gemm import linen as linen
    from jax_fp8gemm import maxtext as maxtext
    from jax_fp8gemm import nnx as nnx
    from jax_fp8gemm import qwix as qwix
    from jax_fp8gemm import tokamax as tokamax
else:
    _LATER = ("checkpoint", "linen", "maxtext", "nnx", "qwix", "tokamax")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})

    def __getattr__(name: str) -> _typing.Any:
        if name in _LATER:
            return _importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
