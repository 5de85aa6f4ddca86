"""Processes of this program, which run what this one runs."""

import sys
from collections.abc import Sequence


def command(*arguments: str) -> Sequence[str]:
    """Returns the command line of `python -m benchmarks` with these arguments.

    Where this process leaves the working directory out of Python's path (`python -P`), so does the
    new one: the installed package stays in front of a checkout that has no extension.
    """
    safe_path = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe_path, "-m", "benchmarks", *arguments]
