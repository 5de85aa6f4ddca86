"""Records the bits of every op on an H200, for the emulation to be checked on machines without one.

    python tests/record_ops.py [--whole FOLDER]      on the GPU: runs every case, writes the file

record_h200.py records f32 products; this records what else an op may do: bf16 results, sums into an
array, groups, weight gradients, activations, NaN, Inf, under- and overflow. Operands follow from a
seed through PCG64's raw bits and exact arithmetic. The file holds the hash of each result and some
of its bits. --whole also stores all results, to find out where two differ.
"""

import argparse
import base64
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
import ops_cases
import record_h200

RECORDED = pathlib.Path(__file__).parent / "recorded" / "h200_ops.json"
_NUM_SAMPLES = 12
_NUM_THREADS = 16

Run = Callable[[str], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Case:
    """run(implementation) -> the results of an op."""

    name: str
    run: Run


def cases() -> list[Case]:
    """All of ops_cases."""
    return [Case(name, run) for name, run in ops_cases.all_cases().items()]


def samples(x: np.ndarray) -> np.ndarray:
    """The bits of some elements."""
    bits = np.ascontiguousarray(x).view(f"<u{x.dtype.itemsize}").ravel()
    return bits[np.linspace(0, bits.size - 1, _NUM_SAMPLES).astype(np.int64)]


def encode(x: np.ndarray) -> str:
    return base64.b64encode(x.tobytes()).decode()


def entry(case: Case, results: Sequence[np.ndarray]) -> dict:
    """What the file holds of a case."""
    return {
        "name": case.name,
        "out": [record_h200.digest(x)[:32] for x in results],
        "sample": [encode(samples(x)) for x in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", type=pathlib.Path, help="a folder for all results")
    parser.add_argument("--implementation", default="cuda")
    whole, implementation = (args := parser.parse_args()).whole, args.implementation

    def run(case: Case):
        try:
            return case, case.run(implementation)
        except Exception as error:  # the other cases are worth their time
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
            return case, None

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        done = [(case, out) for case, out in pool.map(run, cases()) if out is not None]
    recorded = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    entries = [entry(case, results) for case, results in done]
    RECORDED.write_text(json.dumps(recorded | {"cases": entries}, indent=1) + "\n")
    if whole is not None:
        arrays = {
            f"{hashlib.sha256(case.name.encode()).hexdigest()[:16]}_{i}": np.asarray(x).view(
                f"<u{x.dtype.itemsize}"
            )
            for case, results in done
            for i, x in enumerate(results)
        }
        np.savez_compressed(whole / "whole.npz", **arrays)


if __name__ == "__main__":
    main()
