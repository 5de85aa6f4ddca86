"""What results files say of the sources: the commit, and whether they were changed."""

import json
import subprocess

import pytest

import benchmarks
from benchmarks import provenance
from benchmarks.peers import AbsentError, xla_dense
from benchmarks.problem import Shape


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one commit of one source file."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "STAMP", tmp_path / "benchmarks" / "commit.json")
    for folder in ("jax_fp8gemm", "ffi", "examples", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "jax_fp8gemm" / "a.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("/benchmarks/commit.json\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_git_says_the_commit(checkout):
    clean = provenance.source_commit()
    assert len(clean["commit"]) == 12 and clean["dirty"] is False
    (checkout / "benchmarks" / "results" / "dense.json").write_text("{}")  # what a run writes
    assert provenance.source_commit() == clean
    (checkout / "examples" / "b.py").write_text("")
    assert provenance.source_commit() == clean | {"dirty": True}


def test_a_stamp_says_it_without_git(checkout):
    clean = provenance.source_commit()
    assert benchmarks.main(["stamp"]) == 0
    (checkout / ".git").rename(checkout / "elsewhere")
    assert provenance.source_commit() == clean
    (checkout / "jax_fp8gemm" / "a.py").write_text("a = 2\n")
    assert provenance.source_commit() == {"commit": "unknown", "dirty": None}
    with pytest.raises(RuntimeError, match="stamp must run in a git checkout"):
        provenance.write_stamp()


@pytest.mark.parametrize("command", ["stamp", "page"])
def test_commands_without_arguments_refuse_one(command, capsys):
    """They write files: who asks for help must not get those."""
    assert benchmarks.main([command, "-h"]) == 2
    assert f"{command} takes no arguments; got -h" in capsys.readouterr().err


def test_a_stamp_says_it_beside_a_git_that_is_older(checkout):
    (checkout / "jax_fp8gemm" / "a.py").write_text("a = 2\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in ([*identity, "commit", "-qam", "b"], ["rev-parse", "--short=12", "HEAD"]):
        command = ["git", "-C", str(checkout), *command]
        newest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    provenance.write_stamp()
    subprocess.run(["git", "-C", str(checkout), "reset", "-q", "--soft", "HEAD~1"], check=True)
    assert provenance.source_commit() == {"commit": newest, "dirty": False}
    (checkout / "jax_fp8gemm" / "a.py").write_text("a = 3\n")
    found = provenance.source_commit()
    assert found["dirty"] is True and found["commit"] != newest


def test_a_stamp_keeps_that_there_were_changes(checkout):
    (checkout / "ffi" / "gemm.cc").write_text("")
    assert provenance.write_stamp()["dirty"] is True
    (checkout / ".git").rename(checkout / "elsewhere")
    assert provenance.source_commit()["dirty"] is True


def test_kept_results_need_a_clean_commit(monkeypatch, capsys):
    from benchmarks import options

    monkeypatch.setattr(options, "source_commit", lambda: {"commit": "abc", "dirty": True})
    with pytest.raises(SystemExit):
        benchmarks.main(["dense", "--save", str(provenance.ROOT / options.RESULTS)])
    assert "--save needs the sources of one commit, without changes" in capsys.readouterr().err


def test_xla_is_not_asked_for_what_it_compiles_for_minutes():
    with pytest.raises(AbsentError, match="XLA's autotuning takes minutes above 3.0e"):
        xla_dense.xla_fp8(Shape(4096, 7168, 16384), is_1d1d=False)


def test_versions_are_those_of_what_is_installed(tmp_path, monkeypatch):
    package = tmp_path / "deep_gemm"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.6.1'\n")
    (tmp_path / "COMMIT").write_text("54e2261\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = provenance.versions()
    assert versions["deep_gemm"] == "2.6.1+54e2261" and "jaxlib" in versions
    json.dumps(versions)
