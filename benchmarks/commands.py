"""What `python -m jax_fp8gemm bench` runs: a family, or one of the commands about all of them."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith(("jax_fp8gemm.", "benchmarks")):
            raise
        print(f"bench needs {name}: pip install -e '.[bench]'")
        return 1


def _run(arguments: Sequence[str]) -> int:
    """Imports what a command needs, and runs it."""
    command = arguments[0] if arguments else ""
    if command in ("stamp", "page") and len(arguments) > 1:
        print(f"{command} takes no arguments; got {' '.join(arguments[1:])}", file=sys.stderr)
        return 2
    if command == "stamp":
        from benchmarks.provenance import write_stamp

        print(write_stamp())
        return 0
    if command == "suite":
        from benchmarks.suite import main as suite

        return suite(arguments[1:])
    if command == "warm-deepgemm":
        from benchmarks.warm_deepgemm import main as warm

        return warm(arguments[1:])
    if command == "tile-times":
        from benchmarks.tile_times import main as tile_times

        return tile_times(arguments[1:])
    if command == "spread":
        from benchmarks.spread import main as spread

        return spread(arguments[1:])
    if command == "page":
        from benchmarks.pages.fill import main as page

        return page()
    if command == "plot":
        from benchmarks.pages.plots import main as plot

        return plot(arguments[1:])
    from benchmarks.cli import main as family

    return family(arguments)
