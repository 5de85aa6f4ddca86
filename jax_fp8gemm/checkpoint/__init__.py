"""Published FP8 checkpoints: load reads safetensors onto devices, save writes the same bytes back.

docs/checkpoints.md lists the formats. Saving needs the package safetensors: the extra "checkpoint".
"""

from jax_fp8gemm.checkpoint._checkpoint import Checkpoint as Checkpoint
from jax_fp8gemm.checkpoint._checkpoint import StoredScale as StoredScale
from jax_fp8gemm.checkpoint._load import load as load
from jax_fp8gemm.checkpoint._placement import sharding_rules as sharding_rules
from jax_fp8gemm.checkpoint._save import save as save
