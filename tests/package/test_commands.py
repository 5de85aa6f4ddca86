"""The commands that pages show exist, with the options, targets and files that they name."""

import argparse
import importlib
import importlib.util
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import pytest
from pages import PAGES, ROOT, commands

import benchmarks
from benchmarks import options
from jax_fp8gemm import __main__ as command_line

# Programs of others. "#!/bin/bash" is a comment.
_OTHERS = {"chmod", "export", "pre-commit"}


class _Parsed(Exception):
    """The options were read: as far as a test goes."""


@pytest.fixture
def parse_only(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser, *args):
        raise _Parsed(parse(parser, *args))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    # The commands without options.
    monkeypatch.setattr("benchmarks.provenance.write_stamp", lambda: "")
    monkeypatch.setattr("benchmarks.pages.fill.main", lambda: 0)


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))])
def test_commands_of_a_page_exist(page, parse_only, monkeypatch):
    for command in commands(page):
        if re.search(r"<\w+>", command):  # what the reader puts in
            continue
        # Settings of the environment, and Slurm's launcher with its options.
        is_before = lambda word: "=" in word or word == "srun" or word.startswith("--")
        words = list(itertools.dropwhile(is_before, shlex.split(command, comments=True)))
        for one in _split(words, "&&"):
            _check(one, monkeypatch)


def test_info_runs(capsys):
    assert command_line.main(["info"]) == 0
    assert "cuda kernels" in capsys.readouterr().out


def _split(words, separator):
    """The commands of a line."""
    groups = itertools.groupby(words, lambda word: word == separator)
    return [list(group) for is_separator, group in groups if not is_separator]


def _check(words, monkeypatch):
    match words:
        case ["python" | ".venv/bin/python", *args]:
            _check_python([arg for arg in args if arg != "-P"], monkeypatch)
        case ["pip", *args]:
            _check_python(["-m", "pip", *args], monkeypatch)
        case ["bench", *args]:
            _check_python(["-m", "benchmarks", *args], monkeypatch)
        case ["make", *args]:
            subprocess.run(["make", "-n", *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        case [program, *_]:
            assert program in _OTHERS, words


def _check_python(args, monkeypatch):
    match args:
        case ["-m", "jax_fp8gemm", *rest]:
            _check_options(lambda: command_line.main(rest))
        case ["-m", "benchmarks", *rest]:
            _check_options(lambda: benchmarks.main(rest))
        case ["-m", "pip", "install", *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            for extra in re.findall(r"(?:\.|jax_fp8gemm)\[([\w,]+)\]", " ".join(packages)):
                assert set(extra.split(",")) <= set(project["optional-dependencies"]), args
        case ["-m", "pytest", *rest]:
            assert all((ROOT / path).exists() for path in rest if "/" in path), args
        case ["-m", module, *_]:
            assert importlib.util.find_spec(module), args
        case [script, *rest] if "/" in script:
            monkeypatch.setattr(sys, "argv", [script, *rest])
            _check_options(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))


def _check_options(run):
    """Runs a command as far as it reads its options. One that is wrong ends in SystemExit."""
    try:
        run()
    except _Parsed as parsed:
        (found,) = parsed.args
        if hasattr(found, "family"):
            options.shapes_of(found)
            options.check(found)
