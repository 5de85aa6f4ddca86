"""How much XLA works on the tests' programs: little on most, and on some as it does for users."""

# XLA:CPU spends most of the tests' time in LLVM, on programs that run once: this halves it.
QUICK_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    # Most of the rest goes into MLIR, which it can do without: the same fusions, emitted otherwise.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    # Two processes share two cores: a program in one piece takes 9 % less than in several.
    "--xla_cpu_parallel_codegen_split_count=1",
]
# What is true to the bit is tested so too. "" clears the extra options.
AS_USERS_DO = {"xla_backend_optimization_level": 3, "xla_backend_extra_options": ""}
