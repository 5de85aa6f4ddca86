"""Queues of work on the device, one for each framework, and the flush of the L2 in each."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

Flush = Literal["write", "read"]
FLUSHES: tuple[Flush, ...] = ("write", "read")
_FLUSH_BYTES = 1 << 30  # far above any L2


@runtime_checkable
class Queue(Protocol):
    """One framework's stream of work on the device."""

    def flush(self, how: Flush) -> None:
        """Queues a pass over a large buffer, so that the next call finds the L2 cold.

        how: "write" leaves lines that the next call must write back first; "read" leaves none.
        """
        ...

    def launch(self, function: Callable[[], Any]) -> None:
        """Queues one call."""
        ...

    def wait(self) -> None:
        """Waits for all queued work."""
        ...


class JaxQueue:
    """JAX's stream on the default device."""

    def __init__(self, flush_bytes: int = _FLUSH_BYTES):
        self._fill = jax.jit(lambda value: jnp.broadcast_to(value, (flush_bytes // 4,)))
        self._max = jax.jit(jnp.max)
        # On the device from the start: a copy from the host would run beside the calls.
        self._value = jax.device_put(jnp.float32(1))
        self._buffer: jax.Array | None = None
        self._last: Any = None

    def flush(self, how: Flush) -> None:
        self._last = None  # frees the last result first
        if how == "write":
            self._last = self._fill(self._value)
            return
        if self._buffer is None:
            self._buffer = jax.block_until_ready(self._fill(self._value))
        self._last = self._max(self._buffer)

    def launch(self, function: Callable[[], Any]) -> None:
        self._last = function()

    def wait(self) -> None:
        jax.block_until_ready(self._last)


@functools.cache
def jax_queue() -> JaxQueue:
    """The process's JAX queue."""
    return JaxQueue()


class TorchQueue:
    """torch's current stream."""

    def __init__(self, torch: Any, flush_bytes: int = _FLUSH_BYTES):
        self._torch = torch
        self._buffer = torch.ones(flush_bytes // 4, dtype=torch.float32, device="cuda")

    def flush(self, how: Flush) -> None:
        if how == "write":
            self._buffer.fill_(1.0)
        else:
            self._buffer.amax()

    def launch(self, function: Callable[[], Any]) -> None:
        function()

    def wait(self) -> None:
        self._torch.cuda.synchronize()
