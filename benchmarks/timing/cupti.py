"""Device times of kernels, copies and memsets through CUPTI's activity API, with ctypes alone.

Every library in the process is seen (JAX, torch, our own launches), because CUPTI records what
the driver runs. Fields are read at their offsets in CUPTI's activity records (cupti_activity.h:
CUpti_ActivityKernel4 to 10, CUpti_ActivityMemcpy6 and CUpti_ActivityMemset4 agree on them), so the
module serves CUDA 12 and 13. Source: https://docs.nvidia.com/cupti/api/group__CUPTI__ACTIVITY__API.html
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Iterator

_KIND_MEMCPY, _KIND_MEMSET, _KIND_KERNEL = 1, 2, 10  # kernel: CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
_KINDS = (_KIND_MEMCPY, _KIND_MEMSET, _KIND_KERNEL)
_START_OFFSET, _END_OFFSET, _NAME_OFFSET = 16, 24, 104
_FLUSH_FORCED = 1
_BUFFER_BYTES = 8 << 20  # about 40 000 records, so that CUPTI rarely calls back while work runs
_LIBRARIES: tuple[str, ...] = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")

_Request = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Complete = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class CuptiError(RuntimeError):
    """CUPTI is missing or refused a call."""


@dataclasses.dataclass(frozen=True)
class Activity:
    """One thing the device ran: a kernel (by its mangled name), `[memcpy]` or `[memset]`."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


class Cupti:
    """The process's one CUPTI client. Use `cupti()`, not the class."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._free: list[ctypes.Array[ctypes.c_char]] = []
        self._activities: list[Activity] = []
        self._is_on = False
        # NOTE: CUPTI keeps these pointers for the life of the process; so must we.
        self._request = _Request(self._on_request)
        self._complete = _Complete(self._on_complete)
        self._call("cuptiActivityRegisterCallbacks", self._request, self._complete)
        # Else CUPTI may hand back a buffer that another GPU has begun after a recording, when the
        # process ends and there is no Python left to take it.
        atexit.register(self._flush)

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Activity]]:
        """Yields a list that holds, after the block, what the device ran inside it, by start time.

        The block must wait for its own work before it ends, and so must what ran before it. CUPTI
        stays on afterwards, because turning it on and off takes time: `stop_recording` turns it
        off. Raises: CuptiError if CUPTI refuses, or saw nothing.
        """
        if not self._is_on:
            for kind in _KINDS:
                self._call("cuptiActivityEnable", ctypes.c_int(kind))
            self._is_on = True
        self._flush()
        self._activities = []
        activities: list[Activity] = []
        yield activities
        self._flush()
        activities.extend(sorted(self._activities, key=lambda activity: activity.start_ns))
        if not activities:
            raise CuptiError("bench: CUPTI must see the device's work; got no record of any")

    def stop(self) -> None:
        """Turns CUPTI off, if it is on."""
        if self._is_on:
            self._is_on = False
            for kind in _KINDS:
                self._call("cuptiActivityDisable", ctypes.c_int(kind))
            self._flush()

    def _flush(self) -> None:
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(_FLUSH_FORCED))

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(code, ctypes.byref(text))
            name = (text.value or b"unknown").decode()
            raise CuptiError(f"bench: {function} must succeed; got {name} ({code})")

    def _on_request(self, buffer, size, max_num_records) -> None:
        memory = self._free.pop() if self._free else ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_num_records[0] = address, _BUFFER_BYTES, 0

    def _on_complete(self, context, stream, buffer, size, valid_bytes) -> None:
        del context, stream, size
        record = ctypes.c_void_p()
        next_record = self._library.cuptiActivityGetNextRecord
        num_bytes = ctypes.c_size_t(valid_bytes)
        while not next_record(ctypes.c_void_p(buffer), num_bytes, ctypes.byref(record)):
            if activity := read_record(record.value or 0):
                self._activities.append(activity)
        if (memory := self._buffers.pop(buffer, None)) is not None:
            self._free.append(memory)


def read_record(address: int) -> Activity | None:
    """The activity at an address, or None if it is of another kind or carries no times."""
    kind = ctypes.c_uint32.from_address(address).value
    start = ctypes.c_uint64.from_address(address + _START_OFFSET).value
    end = ctypes.c_uint64.from_address(address + _END_OFFSET).value
    if kind not in _KINDS or not start or not end:
        return None
    if kind != _KIND_KERNEL:
        return Activity("[memcpy]" if kind == _KIND_MEMCPY else "[memset]", start, end)
    name = ctypes.c_char_p.from_address(address + _NAME_OFFSET).value or b""
    return Activity(name.decode(), start, end)


@functools.cache
def cupti() -> Cupti:
    """Loads CUPTI once. Raises: CuptiError if there is none or it refuses."""
    errors = []
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate)
        except OSError as error:
            errors.append(str(error))
        else:
            return Cupti(library)
    raise CuptiError(
        f"bench: libcupti must be loadable; got {'; '.join(errors)}. Install nvidia-cuda-cupti."
    )


def stop_recording() -> None:
    """Turns CUPTI off, if it was loaded."""
    if cupti.cache_info().currsize:
        cupti().stop()


def _candidates() -> list[str]:
    # By soname first: that finds a copy another library has loaded, and two copies would clash.
    candidates: list[str] = list(_LIBRARIES)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in ("cu13/lib", "cuda_cupti/lib"):
            candidates += [str(path) for path in pathlib.Path(root, folder).glob("libcupti.so.1*")]
    toolkit = pathlib.Path("/usr/local/cuda/extras/CUPTI/lib64/libcupti.so")
    return [*candidates, str(toolkit)] if toolkit.exists() else candidates
