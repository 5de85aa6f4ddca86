"""`python -m benchmarks warm-deepgemm`: compiles DeepGEMM's kernels in many processes at once.

It compiles a kernel at the first call of each shape, for seconds. A run that finds them in the
cache (DG_JIT_CACHE_DIR, where that is set) spends no time on it.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks import own_process
from benchmarks.case import Case
from benchmarks.families.all_cases import cases_of
from benchmarks.shapes import row_shapes

PEER = "deepgemm"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks warm-deepgemm", description=__doc__)
    parser.add_argument("tables", nargs="+", help="dense, ragged:held-out, dense:random:40, ...")
    parser.add_argument("-j", "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--share", help="I/N: in this process, every N-th row from the I-th on")
    arguments = parser.parse_args(argv)
    if arguments.share:
        first, step = map(int, arguments.share.split("/"))
        return compile_share(arguments.tables, first, step)
    start = time.perf_counter()
    command = own_process.command("warm-deepgemm", *arguments.tables)
    shares = [f"{i}/{arguments.jobs}" for i in range(arguments.jobs)]
    processes = [subprocess.Popen([*command, "--share", share]) for share in shares]
    num_failed = sum(process.wait() != 0 for process in processes)
    seconds = time.perf_counter() - start
    print(f"warm-deepgemm: {seconds:.0f} s, {num_failed} of {arguments.jobs} processes failed")
    return 1 if num_failed else 0


def compile_share(tables: Sequence[str], first: int, step: int) -> int:
    """Runs DeepGEMM once on its share of the rows. Returns how many of them failed."""
    builds = [
        case.peers[PEER]
        for table in tables
        for case in cases_of(*_table(table))
        if has_deepgemm(case)
    ]
    num_failed = 0
    for build in builds[first::step]:
        try:
            call = build()
            call.queue.launch(call.run)
            call.queue.wait()
            del call
        except Exception as error:  # the row will say so itself
            num_failed += 1
            print(f"warm-deepgemm: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()
    return num_failed


def has_deepgemm(case: Case) -> bool:
    """Whether DeepGEMM has this row. Its products with 1x128 scales on both sides always add."""
    return PEER in case.peers and case.labels.get("accumulate", True)


def _table(text: str) -> tuple[str, Sequence]:
    """A family and its rows, of FAMILY[:ROWS[:N]]."""
    family, rows, num, *_ = [*text.split(":"), "", ""]
    return family, row_shapes(family.replace("-", "_"), rows or "all", num_random=int(num or 0))
