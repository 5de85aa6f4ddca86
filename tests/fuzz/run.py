"""Runs random calls, products and layers in processes: which of them die, hang or are wrong?

    make fuzz

    FUZZ_CALLS, FUZZ_PRODUCTS, FUZZ_LAYERS   how many; 100,000, 5,000 and 200
    FUZZ_SECONDS                after so many, 900, it goes on to the next kind, or ends
    FUZZ_PROCESSES              2
    FUZZ_SEED                   by chance; printed

Exits with 1 where anything is wrong, and prints how to run that call alone.
"""

import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
DEADLINE = 120  # seconds that one call may take, the compilation of its program included


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"FUZZ_{name}") or default)


class Share:
    """The numbers first..last of one kind, in one process after another where one ends early."""

    def __init__(self, kind: str, seed: int, first: int, last: int, seconds: int) -> None:
        self.kind, self.seed, self.next, self.last = kind, seed, first, last
        self.end = time.monotonic() + seconds
        self.count, self.faults = 0, []

    def run(self) -> None:
        while self.next < self.last and time.monotonic() < self.end:
            self._run_process()

    def _command(self, first: int, last: int, seconds: int) -> list[str]:
        numbers = map(str, (self.seed, first, last, seconds))
        return [sys.executable, "-P", "-m", "fuzz.worker", self.kind, *numbers]

    def _run_process(self) -> None:
        seconds = max(1, int(self.end - time.monotonic()))
        process = subprocess.Popen(
            self._command(self.next, self.last, seconds),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS / 'moe'}", "JAX_PLATFORMS": "cpu"},
        )
        lines: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []
        readers = (
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True),
            threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True),
        )
        for reader in readers:
            reader.start()
        number, end = self.next - 1, "died"
        while True:
            try:
                line = lines.get(timeout=DEADLINE)
            except queue.Empty:
                end = f"hung for {DEADLINE} s"
                process.kill()
                break
            if line is None:
                break
            word, text = line.split(" ", 1)
            number_text, *fault = text.split(" ", 1)
            number = int(number_text)
            if word == "run":
                self.count += 1
            elif word == "fault":
                self._report(number, fault[0])
            elif word == "done":
                self.next = number
                end = None
        code = process.wait()
        for reader, stream in zip(readers, (process.stdout, process.stderr), strict=True):
            reader.join()
            stream.close()
        if end is not None:
            self._report(number, f"{end}, exit status {code}: {' '.join(errors[-3:])}")
            self.next = max(number, self.next) + 1

    def _report(self, number: int, text: str) -> None:
        command = " ".join(["PYTHONPATH=tests:tests/moe", *self._command(number, number + 1, 600)])
        self.faults.append(text)
        print(f"{self.kind} {number}: {text}\n    {command}", flush=True)


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def main() -> int:
    seed = setting("SEED", secrets.randbelow(2**31))
    seconds, processes = setting("SECONDS", 900), setting("PROCESSES", 2)
    totals = {
        "calls": setting("CALLS", 100_000),
        "products": setting("PRODUCTS", 5_000),
        "layers": setting("LAYERS", 200),
    }
    print(f"FUZZ_SEED={seed}", flush=True)
    failed = False
    for kind, total in totals.items():
        bounds = [total * i // processes for i in range(processes + 1)]
        shares = [
            Share(kind, seed, first, last, seconds)
            for first, last in zip(bounds, bounds[1:], strict=False)
        ]
        begin = time.monotonic()
        threads = [threading.Thread(target=share.run) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faults = sum(len(share.faults) for share in shares)
        count, took = sum(share.count for share in shares), time.monotonic() - begin
        print(f"{kind}: {count} of {total} in {took:.0f} s, {faults} wrong", flush=True)
        failed |= faults > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
