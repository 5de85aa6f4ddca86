"""How much XLA works on the tests' programs: little on most, and on some as it does for users."""

import importlib.metadata

# XLA:CPU spends most of the tests' time in LLVM, on programs that run once: this halves it.
QUICK_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
]
# What is true to the bit is tested so too.
AS_USERS_DO: dict[str, int | bool] = {"xla_backend_optimization_level": 3}

# Most of the rest goes into MLIR, which this jaxlib, JAX's last for Python 3.11, can do without.
# Newer ones have no such flag, and a process that gives them one ends.
if importlib.metadata.version("jaxlib") == "0.10.2":
    QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    AS_USERS_DO["xla_cpu_use_fusion_emitters"] = True
