"""Runs other projects' tests on our products; fails where limits.toml is wrong or incomplete.

    make conformance JAX_SOURCE=/path/to/jax CONFORMANCE_FLAGS="--suite jax-dot"

docs/conformance.md says what is run and how.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "conformance"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import limits  # noqa: E402
import report  # noqa: E402
import xla_options  # noqa: E402
from suites import SUITES, Suite  # noqa: E402

SECONDS_OF_A_SUITE = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="default: all")
    parser.add_argument("--keep", action="store_true", help="judge the last results, run nothing")
    parser.add_argument("--report", action="store_true", help="write docs/conformance.md's tables")
    parser.add_argument("--without-ours", action="store_true", help="show what fails anyway")
    args = parser.parse_args()
    known = limits.read_limits(HERE / "limits.toml")
    verdicts, faults = {}, []
    for name in args.suite or SUITES:
        if (folder := tests_of(SUITES[name])) is None:
            print(f"{name}: not run: set JAX_SOURCE to a checkout of JAX's tests", flush=True)
            continue
        results = BUILD / f"{name}{'-without-ours' if args.without_ours else ''}.json"
        if not args.keep:
            run_suite(name, folder, results, args.without_ours)
        verdict = limits.judge(name, json.loads(results.read_text()), known)
        verdicts[name] = verdict
        faults += [f"{name}: {fault}" for fault in verdict.faults]
        print(report.summary(name, verdict), flush=True)
    faults += limits.unused(known, verdicts, SUITES)
    if args.report:
        report.write(ROOT / "docs" / "conformance.md", verdicts)
    print(*faults, sep="\n")
    return bool(faults)


def tests_of(suite: Suite) -> Path | None:
    """The folder of a suite's files; None where the user has to say it and did not."""
    if suite.source == "here":
        return HERE
    if suite.source == "flax":
        return flax_tests()
    source = os.environ.get("JAX_SOURCE")
    return Path(source, "tests") if source else None


def flax_tests() -> Path:
    """Flax's tests, which only the source distribution of the installed version has."""
    version = importlib.metadata.version("flax")
    tests = BUILD / f"flax-{version}" / "tests"
    if not tests.exists():
        download = ["download", "-q", "--no-deps", "--no-binary", "flax", "-d", str(BUILD)]
        subprocess.run([sys.executable, "-m", "pip", *download, f"flax=={version}"], check=True)
        with tarfile.open(BUILD / f"flax-{version}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return tests


def run_suite(name: str, folder: Path, results: Path, without_ours: bool) -> None:
    """pytest in a process of its own: suites put ours in place in modules that others share."""
    BUILD.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    files = [folder / file for file in SUITES[name].files]
    quietly = "-q --tb=no --disable-warnings -c /dev/null -p no:cacheprovider -p no:benchmark"
    command = [sys.executable, "-P", "-m", "pytest", "-p", "plugin", *quietly.split()]
    command += [f"--rootdir={folder}", f"--suite={name}", f"--results={results}", *map(str, files)]
    command += ["--without-ours"] if without_ours else []
    flags = ["--xla_force_host_platform_device_count=8", *xla_options.QUICK_FLAGS]
    env = os.environ | {
        "PYTHONPATH": str(HERE),
        "XLA_FLAGS": " ".join([*flags, os.environ.get("XLA_FLAGS", "")]),
        "JAX_NUM_GENERATED_CASES": str(SUITES[name].num_combinations),
        "JAX_PLATFORMS": "cpu",
    }
    with open(results.with_suffix(".log"), "w") as log:
        subprocess.run(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS_OF_A_SUITE
        )
    if not results.exists():
        sys.exit(f"{name}: pytest died; see {results.with_suffix('.log')}")


if __name__ == "__main__":
    sys.exit(main())
