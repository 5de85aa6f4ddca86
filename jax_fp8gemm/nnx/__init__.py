"""Modules of Flax NNX whose products run in FP8: Linear, LinearGeneral, Einsum, SwiGLU and MoE.

Linear, LinearGeneral and Einsum are Flax's own classes with another product. Their arguments,
parameters and initialisers are Flax's, so a checkpoint of one loads into the other. It needs Flax,
which `import jax_fp8gemm` does not import.
"""

import typing as _typing

try:
    from flax import nnx as _nnx

    from jax_fp8gemm.nnx._experts import BalanceBias as BalanceBias
    from jax_fp8gemm.nnx._experts import MoE as MoE
    from jax_fp8gemm.nnx._experts import SwiGLU as SwiGLU
    from jax_fp8gemm.nnx._linear import Einsum as Einsum
    from jax_fp8gemm.nnx._linear import Linear as Linear
    from jax_fp8gemm.nnx._linear import LinearGeneral as LinearGeneral
    from jax_fp8gemm.nnx._scopes import name_scopes as name_scopes
    from jax_fp8gemm.nnx._weights import quantize_weights as quantize_weights
except ImportError as error:
    raise ImportError("jax_fp8gemm.nnx needs Flax: pip install flax") from error


if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.Any:
        message = f"module {__name__!r} has no attribute {name!r}"
        if hasattr(_nnx, name):
            message += f". It is one of Flax: flax.nnx.{name}"
        raise AttributeError(message)
