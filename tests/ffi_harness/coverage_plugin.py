"""A pytest plugin: jax_fp8gemm takes its extension from JAX_FP8GEMM_COVERAGE_EXT.

Loaded before jax_fp8gemm is imported, which then finds the module in sys.modules.
"""

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location(
    "jax_fp8gemm._ext", os.environ["JAX_FP8GEMM_COVERAGE_EXT"]
)
assert _spec is not None and _spec.loader is not None
sys.modules["jax_fp8gemm._ext"] = _module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
