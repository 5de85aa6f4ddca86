"""Steps of training of a layer whose experts are spread over all devices.

    python tests/expert_steps_program.py EXCHANGE STEPS

For child processes: prints a hash of the weights after the last step. A process that hangs runs
into its caller's time limit.
"""

import functools
import sys

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm.moe import moe_layer

TOKENS, EXPERTS = 128, 2  # of each device
TOP_K, D, F = 2, 256, 128
RATE = 0.1


def train(exchange: str, steps: int) -> tuple[list[float], str]:
    """Returns the loss of each step, and a hash of the weights."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    on_gpu = jax.default_backend() == "gpu"
    how = dict(mesh=mesh, expert_axis="x", exchange=exchange, top_k=TOP_K)
    how |= dict(implementation=gpu_cases.IMPLEMENTATION) if on_gpu else {}
    m, e = TOKENS * mesh.size, EXPERTS * mesh.size
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    weights = normal(e, D, 2 * F) * D**-0.5, normal(e, F, D) * F**-0.5
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("x")))
    x, target = (place(jnp.asarray(normal(m, D), jnp.bfloat16)) for _ in range(2))
    logits, weights = place(normal(m, e)), place(weights)

    def loss(weights):
        out = moe_layer(x, logits, *weights, **how)
        return jnp.mean((out - target).astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights):
        value, gradients = jax.value_and_grad(loss)(weights)
        # A step as large as the weights' own size, for gradients of a mean are tiny.
        update = lambda w, g: w - RATE * g * jnp.sqrt(jnp.mean(w**2) / jnp.mean(g**2))
        return jax.tree.map(update, weights, gradients), value

    losses = []
    for _ in range(steps):
        weights, value = step(weights)
        losses.append(value)  # read at the end, so that steps wait in the queues of the devices
    return [float(value) for value in losses], gpu_cases.digest(*weights)


if __name__ == "__main__":
    print(train(sys.argv[1], int(sys.argv[2]))[1])
