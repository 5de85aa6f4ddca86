"""A step of training on one process or several, as test_distributed.py runs it.

    python tests/distributed_program.py COORDINATOR PROCESS NUM_PROCESSES OUT.npz

An MLP on a mesh of all processes' devices: tokens are cut by both axes, each weight by both too, so
it is gathered across processes. Data are small integers, whose sums are exact in any order.
"""

import functools
import sys

import jax
import meshes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm import Recipe, matmul

M, D, F = 512, 256, 512  # tokens, of which four devices hold a scale block each
LEARNING_RATE = 2.0**-4
_AXES = ("x", "y")
SPECS = {"x": P(_AXES), "dout": P(_AXES), "up": P("x", "y"), "down": P("y", "x")}

_product = functools.partial(matmul, recipe=Recipe(pow2_scale=True))


def inputs() -> dict[str, np.ndarray]:
    """Of -1, 0 and 1, three quarters 0: no sum of a step leaves the integers that f32 holds."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.choice([-1, 0, 0, 0, 0, 0, 0, 1], shape).astype(np.float32)
    return {"x": draw(M, D), "dout": draw(M, D), "up": draw(D, F), "down": draw(F, D)}


def step(weights, x, dout):
    """The loss, the gradients, and the weights after a step of gradient descent."""

    def loss(weights):
        h = jax.nn.relu(_product(x, weights["up"]))
        return (_product(h, weights["down"]) * dout).sum()

    value, gradients = jax.value_and_grad(loss)(weights)
    descend = lambda w, gradient: w - LEARNING_RATE * gradient
    return value, gradients, jax.tree.map(descend, weights, gradients)


def train(x, dout, up, down) -> tuple[dict[str, jax.Array], list[str]]:
    """Results of one step, and what it moves between devices."""
    weights = {"up": up, "down": down}
    compiled = jax.jit(step).lower(weights, x, dout).compile()
    loss, gradients, weights = compiled(weights, x, dout)
    gradients = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"loss": loss} | gradients | weights, meshes.collectives(compiled)


def main() -> None:
    coordinator, process, num_processes, path = sys.argv[1:]
    jax.distributed.initialize(
        coordinator, int(num_processes), int(process), initialization_timeout=30
    )
    assert jax.process_count() == int(num_processes)
    on = Mesh(np.array(jax.devices()).reshape(int(num_processes), -1), _AXES)
    place = lambda x, spec: jax.make_array_from_callback(
        x.shape, NamedSharding(on, spec), lambda index: x[index]
    )
    results, moved = train(**{name: place(x, SPECS[name]) for name, x in inputs().items()})
    for name in ("up", "down"):
        for x in (results[name], results[f"d{name}"]):
            assert x.sharding.is_equivalent_to(NamedSharding(on, SPECS[name]), 2), x.sharding
    whole = jax.jit(lambda results: results, out_shardings=NamedSharding(on, P()))(results)
    np.savez(path, moved=np.array(moved), **whole)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
