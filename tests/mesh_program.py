"""A program on all devices whose kernels are first loaded while collectives wait for each other.

    python tests/mesh_program.py

For child processes: prints a hash of its gradients. Tokens and weights share one axis, so that each
product waits for weights from all devices, and each gradient is summed over them. Every device
arrives there at another time.
"""

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp8gemm as jf

WIDTHS = (1024, 2048, 3072, 1024)  # a shape, and so perhaps a kernel, for each product
NUM_STEPS = 1000  # of other work, some ms


def delayed(x: jax.Array) -> jax.Array:
    """x, later on each device than on the one before."""
    num_steps = NUM_STEPS * jax.lax.axis_index("x")
    work = jax.lax.fori_loop(0, num_steps, lambda _, y: jnp.tanh(y @ y.T @ y), x[:256])
    return x + 0 * work.sum()


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        full = jax.lax.all_gather(w, "x", axis=0, tiled=True)
        x = jax.nn.relu(jf.matmul(x, full, implementation=gpu_cases.IMPLEMENTATION))
        x *= full.shape[0] ** -0.5
    return jax.lax.psum((x.astype(jnp.float32) ** 2).mean(), "x")


def main() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    shapes = zip(WIDTHS, WIDTHS[1:], strict=False)
    weights, x = [normal(*shape) for shape in shapes], normal(512 * mesh.size, WIDTHS[0])
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    weights, x = jax.device_put((weights, x), sharding)

    cut = lambda function, **specs: jax.jit(jax.shard_map(function, mesh=mesh, **specs))
    wait = cut(lambda x: jax.lax.psum(delayed(x), "x"), in_specs=P("x"), out_specs=P())
    step = cut(
        lambda weights, x: jax.value_and_grad(loss)(weights, delayed(x)),
        in_specs=(P("x"), P("x")),
        out_specs=(P(), P("x")),
    )
    wait, step = wait.lower(x).compile(), step.lower(weights, x).compile()
    waiting = wait(x)  # devices wait for each other in here while the kernels of `step` are loaded
    results = [step(weights, x) for _ in range(3)]
    jax.block_until_ready(waiting)
    # Without the loss: XLA may choose another reduction in another process.
    hashes = {gpu_cases.digest(*jax.tree.leaves(gradients)) for _, gradients in results}
    assert len(hashes) == 1, hashes
    print(*hashes)


if __name__ == "__main__":
    main()
