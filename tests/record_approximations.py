"""Records ex2.approx.ftz.f32 and rcp.approx.ftz.f32 of an H200, for their model to be checked.

    python tests/record_approximations.py [--raw FOLDER]      on the GPU

Results are held as one SHA-256 for each set of inputs (INPUTS): every mantissa, every fraction of a
power, and powers of every size. --raw also stores them as differences from the rounded exact value.
"""

import argparse
import ctypes
import hashlib
import json
import lzma
import pathlib
from collections.abc import Callable

import numpy as np

RECORDED = pathlib.Path(__file__).parent / "recorded" / "h200_approximations.json"
_THREADS = 256
_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry run_{name}(.param .u64 buffer)
{{
  .reg .b32 %r<4>;
  .reg .b64 %rd<3>;
  .reg .f32 %f<2>;
  ld.param.u64 %rd1, [buffer];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r1, %r1, %r2, %r3;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd1, %rd1, %rd2;
  ld.global.f32 %f1, [%rd1];
  {name}.approx.ftz.f32 %f1, %f1;
  st.global.f32 [%rd1], %f1;
  ret;
}}
"""


def _mantissas(exponent: int = 127) -> np.ndarray:
    """Every f32 with this biased exponent."""
    return (np.arange(2**23, dtype=np.uint32) | np.uint32(exponent << 23)).view(np.float32)


def _fractions() -> np.ndarray:
    """Every multiple of 2^-23 in [0, 1)."""
    return np.arange(2**23).astype(np.float32) * np.float32(2**-23)


def _sized(seed: int, exponents: tuple[int, int], sign: bool) -> np.ndarray:
    """2^20 random mantissas, with biased exponents in a range."""
    raw = np.random.PCG64(seed).random_raw(2**20)
    first, last = exponents
    exponent = first + (raw >> np.uint64(32)) % np.uint64(last - first + 1)
    bits = (raw & np.uint64(0x7FFFFF)) | (exponent << np.uint64(23)) | np.uint64(sign << 31)
    return bits.astype(np.uint32).view(np.float32)


def _edges() -> np.ndarray:
    """Zeros, subnormals, infinities, NaN, and the neighbours of all integers up to 160."""
    bits = np.asarray([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000])
    special = bits.astype(np.uint32).view(np.float32)
    integers = np.arange(1, 161).astype(np.float32)
    near = [np.nextafter(integers, np.float32(to)) for to in (0, np.inf)]
    x = np.concatenate([special, integers, *near])
    return np.concatenate([x, -x])


# name -> (instruction, inputs)
INPUTS: dict[str, tuple[str, Callable[[], np.ndarray]]] = {
    "rcp of mantissas": ("rcp", _mantissas),
    "rcp of any size": ("rcp", lambda: _sized(1, (0, 255), False)),
    "rcp of any negative": ("rcp", lambda: _sized(2, (0, 255), True)),
    "rcp of edges": ("rcp", _edges),
    "ex2 of fractions": ("ex2", _fractions),
    "ex2 of 1 .. 2": ("ex2", _mantissas),
    "ex2 of -2 .. -1": ("ex2", lambda: -_mantissas()),
    "ex2 of -1 .. -1/2": ("ex2", lambda: -_mantissas(126)),
    "ex2 of small": ("ex2", lambda: _sized(3, (90, 126), False)),
    "ex2 of small negative": ("ex2", lambda: _sized(4, (90, 126), True)),
    "ex2 of large": ("ex2", lambda: _sized(5, (127, 135), False)),
    "ex2 of large negative": ("ex2", lambda: _sized(6, (127, 135), True)),
    "ex2 of edges": ("ex2", _edges),
}


def digest(x: np.ndarray) -> str:
    """SHA-256 of the bits."""
    return hashlib.sha256(x.astype("<f4").tobytes()).hexdigest()


class _Gpu:
    """Runs an instruction on an array, through the driver."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *args) -> None:
        status = getattr(self._cuda, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned CUresult {status}")

    def run(self, instruction: str, x: np.ndarray) -> np.ndarray:
        """The instruction of every element."""
        padded = np.pad(x, (0, -len(x) % _THREADS))
        out, size = np.empty_like(padded), ctypes.c_size_t(padded.nbytes)
        buffer, module, function = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_void_p()
        ptx = _PTX.format(name=instruction).encode()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx)
        self._call(
            "cuModuleGetFunction", ctypes.byref(function), module, f"run_{instruction}".encode()
        )
        self._call("cuMemAlloc_v2", ctypes.byref(buffer), size)
        self._call("cuMemcpyHtoD_v2", buffer, ctypes.c_void_p(padded.ctypes.data), size)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        grid = len(padded) // _THREADS
        self._call("cuLaunchKernel", function, grid, 1, 1, _THREADS, 1, 1, 0, None, params, None)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), buffer, size)
        self._call("cuMemFree_v2", buffer)
        self._call("cuModuleUnload", module)
        return out[: len(x)]


def _exact(instruction: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
        return (1 / x if instruction == "rcp" else np.exp2(x)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=pathlib.Path, help="a folder for all results")
    raw, gpu, recorded = parser.parse_args().raw, _Gpu(), {}
    for name, (instruction, inputs) in INPUTS.items():
        x = inputs()
        out = gpu.run(instruction, x)
        recorded[name] = digest(out)
        bits = lambda y: y.view(np.int32).astype(np.int64)
        error = bits(out) - bits(_exact(instruction, x))
        print(f"{name:24s} errors {np.percentile(error, [0, 1, 50, 99, 100])}", flush=True)
        if raw is not None:
            data = lzma.compress(error.astype("<u4").tobytes(), preset=1)
            (raw / f"{name.replace(' ', '_').replace('/', '')}.xz").write_bytes(data)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
