"""What the command line says of versions, and of what is missing."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

import jax_fp8gemm
from jax_fp8gemm import __main__
from jax_fp8gemm._runtime import extension


def _printed_versions(capsys) -> dict[str, str]:
    with pytest.raises(SystemExit) as end:
        __main__.main(["--version"])
    assert end.value.code == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_version_is_that_of_the_installed_packages(capsys):
    found = _printed_versions(capsys)
    assert found.pop("ffi_api")
    assert list(found) == ["jax_fp8gemm", "jax", "jaxlib"]
    assert found == {name: importlib.metadata.version(name) for name in found}
    assert found["jax_fp8gemm"] == jax_fp8gemm.__version__


def test_version_without_the_extension(monkeypatch, capsys):
    monkeypatch.setattr(extension, "_ext", None)
    monkeypatch.setattr(extension, "_ext_fault", "no such file", raising=False)
    found = _printed_versions(capsys)
    assert found["jax_fp8gemm"] == jax_fp8gemm.__version__
    assert found["ffi_api"].startswith("none: jax_fp8gemm: the extension jax_fp8gemm._ext ")


def _bench(*arguments: str) -> int:
    return __main__.main(["bench", *arguments])


def _benchmarks(*arguments: str) -> int:
    import benchmarks

    return benchmarks.main(arguments)


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    """The package is that of the checkout, also where a wheel is installed."""
    package = Path(__file__).parents[2] / "jax_fp8gemm"
    monkeypatch.setattr(__main__, "__file__", str(package / "__main__.py"))


@pytest.fixture
def anew(monkeypatch):
    """Has benchmarks/ import its modules again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("run", [_bench, _benchmarks])
def test_help_of_bench(run, capsys):
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m jax_fp8gemm bench ")
    assert "other commands, in place of FAMILY: suite, " in printed
    assert "tile-times" in printed


@pytest.mark.parametrize("run", [_bench, _benchmarks])
@pytest.mark.parametrize("missing", ["tqdm", "jax_fp8gemm"])
def test_bench_says_what_it_needs(anew, monkeypatch, capsys, run, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for argument in ("dense", "--help"):
        assert run(argument) == 1
        assert capsys.readouterr().out == f"bench needs {missing}: pip install -e '.[bench]'\n"


def test_bench_says_where_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "jax_fp8gemm" / "__main__.py"))
    assert _bench("--help") == 1
    printed = capsys.readouterr().out
    assert "bench is in the folder benchmarks/ of a checkout of jax_fp8gemm" in printed
