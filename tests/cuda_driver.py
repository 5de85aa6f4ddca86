"""CUDA's driver API by ctypes, for tests. A call that fails raises."""

import ctypes


class Driver:
    """Its attributes are the functions of libcuda."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str):
        function = getattr(self._cuda, name)

        def call(*args) -> None:
            status = function(*args)
            if status:
                raise RuntimeError(f"{name} returned CUresult {status}")

        return call
