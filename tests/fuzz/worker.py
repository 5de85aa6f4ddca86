"""The calls, products or layers of a process: run.py starts some, and sees when one dies or hangs.

    PYTHONPATH=tests:tests/moe python -P -m fuzz.worker KIND SEED FIRST LAST SECONDS

KIND: calls, products or layers.

Call i of a seed is the same in any process. Prints `run i` before each, `fault i text` after one
that is wrong, and `done i` at the end; with FIRST == LAST - 1 what the call is, too.
"""

import os
import sys
import time
import warnings

import xla_options

if __name__ == "__main__":  # before jax starts a backend
    devices = "--xla_force_host_platform_device_count=4"  # for layers
    os.environ["XLA_FLAGS"] = " ".join([*xla_options.QUICK_FLAGS, devices])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from fuzz import calls, layers, products


def run_call(rng: np.random.Generator, is_shown: bool) -> str | None:
    call = calls.random_call(rng)
    if is_shown:
        print(call)
    fault = calls.fault(call)
    return fault and f"{call}: {fault}"


def run_product(rng: np.random.Generator, is_shown: bool) -> str | None:
    op, fault = products.random_product(rng)
    if is_shown:
        print(op)
    return fault and f"{op}: {fault}"


def run_layer(rng: np.random.Generator, is_shown: bool) -> str | None:
    layer, fault = layers.random_layer(rng)
    if is_shown:
        print(layer)
    return fault and f"{layer}: {fault}"


def main(kind: str, *numbers: str) -> None:
    seed, first, last, seconds = map(int, numbers)
    run = dict(calls=run_call, products=run_product, layers=run_layer)[kind]
    end = time.monotonic() + seconds
    warnings.simplefilter("ignore")
    i = first
    while i < last and time.monotonic() < end:
        print(f"run {i}", flush=True)
        fault = run(np.random.default_rng([seed, i]), last - first == 1)
        if fault is not None:
            print(f"fault {i} {' '.join(fault.split())}", flush=True)
        i += 1
    print(f"done {i}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
