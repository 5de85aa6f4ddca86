"""Keeps a second CUDA stream busy beside JAX's, through the driver and a hand-written kernel."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import cuda_driver

# Each thread walks the buffer: loads, an FMA, a store. A few microseconds a block.
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry churn(.param .u64 buffer, .param .u32 steps, .param .u32 mask)
{
  .reg .pred %done;
  .reg .b32 %r<8>;
  .reg .b64 %rd<4>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [buffer];
  ld.param.u32 %r1, [steps];
  ld.param.u32 %r2, [mask];
  mov.u32 %r3, %ctaid.x;
  mov.u32 %r4, %ntid.x;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r3, %r3, %r4, %r5;
  mov.f32 %f2, 0f3F800000;
loop:
  and.b32 %r6, %r3, %r2;
  mul.wide.u32 %rd2, %r6, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f1, [%rd3];
  fma.rn.f32 %f1, %f1, %f2, %f2;
  st.global.f32 [%rd3], %f1;
  add.u32 %r3, %r3, 40503;
  sub.u32 %r1, %r1, 1;
  setp.ne.u32 %done, %r1, 0;
  @%done bra loop;
  ret;
}
"""
_BUFFER_BYTES = 64 << 20
_NON_BLOCKING = 1


class Load:
    """Counts what the second stream has run."""

    def __init__(self) -> None:
        self.launches = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._guarded_run)

    def start(self) -> None:
        """Starts to launch."""
        self._thread.start()

    def stop(self) -> None:
        """Waits for the last launch."""
        self._stop.set()
        self._thread.join()

    def _guarded_run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        cuda, ref = cuda_driver.Driver(), ctypes.byref
        device, context = ctypes.c_int(), ctypes.c_void_p()
        stream, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        buffer = ctypes.c_uint64()
        cuda.cuInit(0)
        cuda.cuDeviceGet(ref(device), 0)
        cuda.cuDevicePrimaryCtxRetain(ref(context), device)
        cuda.cuCtxSetCurrent(context)
        cuda.cuStreamCreate(ref(stream), _NON_BLOCKING)
        cuda.cuMemAlloc_v2(ref(buffer), ctypes.c_size_t(_BUFFER_BYTES))
        cuda.cuMemsetD8_v2(buffer, ctypes.c_ubyte(0), ctypes.c_size_t(_BUFFER_BYTES))
        cuda.cuModuleLoadData(ref(module), _PTX)
        cuda.cuModuleGetFunction(ref(function), module, b"churn")
        values = (buffer, ctypes.c_uint32(64), ctypes.c_uint32(_BUFFER_BYTES // 4 - 1))
        params = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
        while not self._stop.is_set():
            # Grids of changing size, so that products find another set of free SMs each time.
            grid = 1 + 37 * self.launches % 400
            cuda.cuLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, stream, params, None)
            self.launches += 1
            if self.launches % 8 == 0:
                cuda.cuStreamSynchronize(stream)
        cuda.cuStreamSynchronize(stream)
        cuda.cuMemFree_v2(buffer)
        cuda.cuModuleUnload(module)
        cuda.cuStreamDestroy_v2(stream)
        cuda.cuDevicePrimaryCtxRelease_v2(device)


@contextlib.contextmanager
def busy() -> Iterator[Load]:
    """A thread launches short kernels on its own stream for as long as the block runs."""
    load = Load()
    load.start()
    try:
        yield load
    finally:
        load.stop()
    if load.error is not None:
        raise load.error
