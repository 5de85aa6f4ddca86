"""tokamax's ragged products on its Mosaic GPU kernel.

Its own choice on Hopper is one small tile for every shape, and its autotuner times hundreds of
configs by a profiler. So a few configs of its search space are timed here, and the best one runs.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.peers import AbsentError
from benchmarks.timing.rounds import measure
from benchmarks.timing.timer import Call, sample_flushed

Product = Callable[..., jax.Array]  # (lhs, rhs, group_sizes)
# (block_m, block_k, num_stages, persistent, grid_tile_width); block_n is fixed by the dtype.
_CONFIGS = ((128, 128, 4, True, 8), (128, 128, 4, False, 1), (64, 128, 4, True, 4))
_CONFIGS += ((64, 256, 2, True, 1), (128, 256, 2, True, 4))
_BLOCK_N = {2: 64, 4: 32}  # by the bytes of a result's element


def tokamax_product(name: str = "ragged_dot") -> Product:
    """tokamax's function of that name with its own choice of config. Raises: ImportError."""
    tokamax = importlib.import_module("tokamax")
    return functools.partial(getattr(tokamax, name), implementation="mosaic")


def fastest(
    build: Callable[[Product], Call], name: str, out_bytes: int, max_configs: int | None = None
) -> Call:
    """The fastest of the calls that `build` makes of tokamax's product by several configs.

    max_configs: beside tokamax's own choice, for calls that take long to compile.
    """
    times: list[tuple[float, int, Call]] = []
    errors: list[str] = []
    configured = itertools.islice(_configured(name, out_bytes), max_configs)
    for i, product in enumerate([tokamax_product(name), *configured]):
        try:
            call = build(product)
            times.append((measure(call, sample_flushed, num_calls=3).us, i, call))
        except Exception as error:  # of a config that does not fit the shape
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
    if not times:
        raise AbsentError(f"no config ran: {errors[0]}")
    return min(times)[2]


def _configured(name: str, out_bytes: int) -> Iterator[Product]:
    tokamax: Any = importlib.import_module("tokamax")
    gpu: Any = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu")
    base: Any = importlib.import_module("tokamax._src.ops.ragged_dot.base")
    for block_m, block_k, num_stages, persistent, width in _CONFIGS:
        config = gpu.Config(
            block_m=block_m,
            block_n=_BLOCK_N[out_bytes],
            block_k=block_k,
            num_stages=num_stages,
            split_k=1,
            persistent=persistent,
            grid_tile_width=width,
        )
        product = gpu.PallasMosaicGpuRaggedDot(config=config)
        vjp = functools.partial(base.vjp, dlhs_ragged_dot=product, drhs_ragged_dot=product)
        kernel = gpu.PallasMosaicGpuRaggedDot(config=config, vjp=vjp)
        yield functools.partial(getattr(tokamax, name), implementation=[kernel])
