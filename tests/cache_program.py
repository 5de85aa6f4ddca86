"""Compiles programs on a mesh and says of each whether JAX's compilation cache had it.

    python tests/cache_program.py CACHE_FOLDER

Lines of: the program, cache_hits or cache_misses, a sum of what it computes.
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import Recipe, matmul

M, N, K = 512, 256, 512


def main() -> None:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    on = Mesh(np.array(jax.devices()), ("x",))
    rng = np.random.default_rng(0)
    operands = [
        jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(on, P("x")))
        for shape in ((M, K), (K, N))
    ]

    def run(name, function):
        lowered = jax.jit(function).lower(*operands)
        events.clear()
        compiled = lowered.compile()
        (found,) = (event.split("/")[-1] for event in events if "/cache_" in event)
        print(name, found, float(np.abs(compiled(*operands)).sum()))

    spec = P("x")
    run("shard_map", jax.shard_map(matmul, mesh=on, in_specs=(spec, P()), out_specs=spec))
    run("jit", lambda lhs, rhs: matmul(lhs, rhs))
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    run("jit_without_address", lambda lhs, rhs: matmul(lhs, rhs))
    powers_of_two = Recipe(pow2_scale=True)
    run("other_parameters", lambda lhs, rhs: matmul(lhs, rhs, recipe=powers_of_two))


if __name__ == "__main__":
    main()
