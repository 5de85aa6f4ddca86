"""Arrays on the GPU that end where mapped memory ends: a kernel that reads on faults.

They find reads by tensor maps too, whose addresses no instruction names.
"""

import ctypes
from types import SimpleNamespace

import cuda_driver
import jax
import jax.numpy as jnp
import numpy as np

_PAGE = 2 << 20  # The granularity of mappings.
_ALIGNMENT = 16  # Of the addresses that the kernels take.
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, with room to spare behind."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("rest", ctypes.c_ubyte * 128),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class GuardedMemory:
    """`num_bytes` of mapped memory with nothing mapped on either side; used by one array at a time.

    num_bytes: a multiple of 2 MiB.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._driver = cuda_driver.Driver()
        self._start = self._map()

    def place(self, x: np.ndarray, shape: tuple[int, ...] | None = None) -> jax.Array:
        """x, copied to the end of this memory. At most 15 bytes follow it.

        shape: what the result claims to be. A larger one reaches past the end.
        """
        x = np.ascontiguousarray(x)
        taken = -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        assert taken <= self.num_bytes, (taken, self.num_bytes)
        address = self._start + self.num_bytes - taken
        source = x.ctypes.data_as(ctypes.c_void_p)
        self._driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), source, ctypes.c_size_t(x.nbytes))
        interface = dict(shape=shape or x.shape, typestr=x.dtype.str, version=3, strides=None)
        interface["data"] = (address, False)
        out = jnp.asarray(SimpleNamespace(__cuda_array_interface__=interface))
        assert out.unsafe_buffer_pointer() == address, "JAX copied the array"
        return out

    def _map(self) -> int:
        """Returns the address of the mapped memory, in the middle of a larger range."""
        driver, ref, size = self._driver, ctypes.byref, ctypes.c_size_t
        jax.block_until_ready(jnp.zeros(1))  # JAX makes the context.
        context, device = ctypes.c_void_p(), ctypes.c_int()
        driver.cuDeviceGet(ref(device), 0)
        driver.cuDevicePrimaryCtxRetain(ref(context), device)
        driver.cuCtxSetCurrent(context)
        base, memory = ctypes.c_uint64(), ctypes.c_uint64()
        everything = size(self.num_bytes + 2 * _PAGE)
        driver.cuMemAddressReserve(ref(base), everything, size(_PAGE), ctypes.c_uint64(0), size(0))
        properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, 0))
        mapped = size(self.num_bytes)
        driver.cuMemCreate(ref(memory), mapped, ref(properties), size(0))
        start = ctypes.c_uint64(base.value + _PAGE)
        driver.cuMemMap(start, mapped, size(0), memory, size(0))
        access = _Access(_Location(_ON_DEVICE, 0), _READ_WRITE)
        driver.cuMemSetAccess(start, mapped, ref(access), size(1))
        return start.value
