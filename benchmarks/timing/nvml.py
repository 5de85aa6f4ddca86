"""Which GPU this is, the SM clock and the energy of a block of work. It needs nvidia-ml-py."""

import ctypes
import functools
import hashlib
import statistics
import threading
import uuid
from typing import Any


class SmClock(threading.Thread):
    """Samples the SM clock inside a `with` block."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[int] = []
        self._done = threading.Event()

    def __enter__(self) -> "SmClock":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        try:
            nvml, device = _device()
            while not self._done.wait(0.02):
                self._samples.append(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))
        except Exception:  # NVML is an extra: without it the clock is not reported
            return

    def mhz(self) -> int | None:
        """The median of the later half of the samples, or None."""
        later = self._samples[len(self._samples) // 2 :]
        return round(statistics.median(later)) if later else None


class Energy:
    """The energy of a `with` block, by the counter of the board."""

    def __init__(self) -> None:
        self._millijoules: list[int] = []

    def __enter__(self) -> "Energy":
        self._read()
        return self

    def __exit__(self, *exception: object) -> None:
        self._read()

    def _read(self) -> None:
        try:
            nvml, device = _device()
            self._millijoules.append(nvml.nvmlDeviceGetTotalEnergyConsumption(device))
        except Exception:  # as above, and older boards have no counter
            return

    def joules(self, num_calls: int) -> float | None:
        """Of one of `num_calls` equal calls, or None where there is no counter."""
        if len(self._millijoules) != 2:
            return None
        start, end = self._millijoules
        return (end - start) / 1e3 / num_calls


def gpu_hash() -> str | None:
    """A short hash of the GPU's UUID, which tells GPUs apart; None where NVML does not say it."""
    try:
        nvml, device = _device()
        uuid = nvml.nvmlDeviceGetUUID(device)
    except Exception:  # as above
        return None
    # Older versions of nvidia-ml-py return bytes.
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _device() -> tuple[Any, Any]:
    import pynvml  # pyright: ignore[reportMissingImports]

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(_first_uuid())


@functools.cache
def _first_uuid() -> str:
    """The UUID of the first GPU that CUDA shows, as NVML writes it.

    NVML counts all GPUs of the host; CUDA those that CUDA_VISIBLE_DEVICES names.
    """
    driver, device, content = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetUuid(content, device)
    )
    if failed:
        raise OSError(f"the CUDA driver must have a GPU; got error {failed}")
    return f"GPU-{uuid.UUID(bytes=bytes(content))}"
