"""A mixture whose experts lie along processes and their devices, as test_distributed.py runs it.

    python tests/expert_hosts_program.py COORDINATOR PROCESS NUM_PROCESSES OUT.npz

Each process is a host with four devices. Tokens cross between the processes once for each of them.
"""

import sys

import jax
import meshes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8gemm.moe import moe_layer

DEVICES = 4  # of a process
HOSTS = 2
TOKENS, EXPERTS, TOP_K, D, F = 64, 8, 2, 128, 64
_AXES = ("host", "device")


def inputs() -> dict[str, np.ndarray]:
    """Choices are given: another process would have other bits of a softmax."""
    rng = np.random.default_rng(0)
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(np.float32)
    return {
        "x": normal(TOKENS, D),
        "indices": rng.integers(0, EXPERTS, (TOKENS, TOP_K)).astype(np.int32),
        "weights": rng.random((TOKENS, TOP_K), np.float32),
        "w_gate_up": normal(EXPERTS, D, 2 * F, scale=D**-0.5),
        "w_down": normal(EXPERTS, F, D, scale=F**-0.5),
        "dout": normal(TOKENS, D),
    }


def run(devices: np.ndarray) -> tuple[dict[str, jax.Array], list[str]]:
    """The result and four gradients, whole on each device, and what moves between devices."""
    on = Mesh(devices.reshape(HOSTS, DEVICES), _AXES)
    cut = NamedSharding(on, P(_AXES))
    place = lambda x: jax.make_array_from_callback(x.shape, cut, lambda index: x[index])

    def vjp(x, indices, weights, w_gate_up, w_down, dout):
        def layer(x, weights, *experts):
            exchange = ("all_to_all", "all_gather")
            options = dict(mesh=on, expert_axis=_AXES, exchange=exchange)
            return moe_layer(x, (indices, weights), *experts, **options)

        out, pullback = jax.vjp(layer, x, weights, w_gate_up, w_down)
        names = "out", "x", "weights", "w_gate_up", "w_down"
        return dict(zip(names, (out, *pullback(dout)), strict=True))

    operands = [place(x) for x in inputs().values()]
    compiled = jax.jit(vjp, out_shardings=cut).lower(*operands).compile()
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(on, P()))
    return whole(compiled(*operands)), meshes.collectives(compiled)


def main() -> None:
    coordinator, process, num_processes, path = sys.argv[1:]
    jax.distributed.initialize(
        coordinator, int(num_processes), int(process), initialization_timeout=30
    )
    assert jax.process_count() == HOSTS and jax.local_device_count() == DEVICES
    results, moved = run(np.array(jax.devices()))
    np.savez(path, moved=np.array(moved), **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
