"""What the environment says: which NVRTC, which cache folder, where the sources are."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import ext_program
import pytest
from ext_program import QUANTIZE_CONFIG

from jax_fp8gemm import __main__
from jax_fp8gemm._runtime import backend_info, environment, extension


@pytest.fixture(autouse=True)
def restored_environment():
    """What a test told the extension goes with it: this ends after monkeypatch does."""
    yield
    extension._configure()


def _info_of_cache():
    """As a process says whose environment is the present one."""
    extension._configure()
    return backend_info.backend_info().cache_dir


def test_readme_lists_every_variable():
    name = r"JAX_FP8GEMM_[A-Z_]+"
    root = Path(__file__).parents[2]
    listed = re.findall(rf"^\| `({name})", (root / "README.md").read_text(), re.MULTILINE)
    sources = [path.read_text() for path in (root / "jax_fp8gemm").rglob("*.py")]
    assert sorted(listed) == sorted({n for text in sources for n in re.findall(name, text)})


def test_the_environment_picks_one_nvrtc(monkeypatch):
    monkeypatch.setenv("JAX_FP8GEMM_NVRTC", "/some/libnvrtc.so")
    assert environment.nvrtc_paths() == ["/some/libnvrtc.so"]
    monkeypatch.delenv("JAX_FP8GEMM_NVRTC")
    assert "libnvrtc.so.13" in environment.nvrtc_paths()


@pytest.mark.parametrize(
    ("plugins", "majors"), [([], "13 12"), ([13], "13 12"), ([12], "12 13"), ([12, 13], "13 12")]
)
def test_nvrtc_is_of_the_cuda_of_jax_where_wheels_of_both_are_installed(
    monkeypatch, tmp_path, plugins, majors
):
    files = {"13": "cu13/lib/libnvrtc.so.13", "12": "cuda_nvrtc/lib/libnvrtc.so.12"}
    for file in files.values():
        (tmp_path / "nvidia" / file).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / file).touch()
    for major in plugins:
        (tmp_path / f"jax_cuda{major}_plugin").mkdir()
    # Nothing else is there to be found.
    finder = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: finder(name, [str(tmp_path)]))
    paths = environment.nvrtc_paths()
    first, second = majors.split()
    assert paths[:2] == [str(tmp_path / "nvidia" / files[major]) for major in (first, second)]
    assert paths[2:4] == [f"libnvrtc.so.{first}", f"libnvrtc.so.{second}"]


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "/a")
    assert environment.cache_dir() == "/a"
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "")
    assert environment.cache_dir() == ""
    assert "memory only" in _info_of_cache()
    monkeypatch.delenv("JAX_FP8GEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert environment.cache_dir() == "/x/jax_fp8gemm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert environment.cache_dir() == "/h/.cache/jax_fp8gemm"
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "~/a")
    assert environment.cache_dir() == "/h/a"


def test_info_says_that_kernels_cannot_be_kept(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for value in (file, file / "below"):
        monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", str(value))
        expected = f"none: {value} cannot be written; kernels are kept in memory only"
        assert _info_of_cache() == expected
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert _info_of_cache() == f"{tmp_path}/a/b (0 kernels)"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", ["", "0", "false", "No", "1", "true"])
def test_the_environment_turns_reports_on(monkeypatch, value):
    monkeypatch.setenv("JAX_FP8GEMM_JIT_DEBUG", value)
    assert environment.is_debug() == (value in ("1", "true"))


def test_precompile_needs_a_folder_and_a_process(monkeypatch, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for value, fault in ((str(file), "File exists"), ("", "empty")):
        monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", value)
        extension._configure()
        assert __main__.main(["precompile"]) == 1
        expected = f"must be a writable folder; got '{value}': {fault}"
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit):
        __main__.main(["precompile", "-j", "0"])
    assert "--jobs must be at least 1; got 0" in capsys.readouterr().err


def test_precompile_without_nvrtc_says_so_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_FP8GEMM_NVRTC", "/none/libnvrtc.so.13")
    extension._configure()
    assert __main__.main(["precompile"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("precompile needs NVRTC: NVRTC 12.4 or newer is needed and none of 1 ")
    assert line.count("Install nvidia-cuda-nvrtc") == 1


def test_the_page_says_how_many_kernels_precompile_makes():
    page = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    (default,) = re.findall(r"`python -m jax_fp8gemm precompile` makes (\d+)\b", page)
    (all_formats,) = re.findall(r"`--all-formats` makes (\d+)\b", page)
    found = [len(__main__._compilations(is_all, with_clusters=False)) for is_all in (False, True)]
    assert found == [int(default), int(all_formats)]


def test_the_kernel_sources_are_found():
    folder = Path(environment.source_dir())
    for name in ("groups.cuh", "gemm/gemm.cuh", "quantize/quantize.cuh", "ptx/wgmma.cuh"):
        assert (folder / name).is_file(), name


def test_relative_paths_are_those_of_the_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_FP8GEMM_NVRTC", "lib/libnvrtc.so")
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", "cache")
    assert environment.nvrtc_paths() == [f"{tmp_path}/lib/libnvrtc.so"]
    assert environment.cache_dir() == f"{tmp_path}/cache"


# Bytes of no UTF-8, which Linux takes in any name

_NVRTC_PROGRAM = f"""
import jax_fp8gemm
from jax_fp8gemm import __main__
from jax_fp8gemm._runtime import precompile
config = {QUANTIZE_CONFIG!r}
try:
    print("cached:", precompile.compile_quantize(config).cached)
except RuntimeError as error:
    print(error)
__main__.main(["info"])
"""


def _run_with(variables):
    """Output of a process with these variables, of bytes, alone and all others unset."""
    ours = {os.fsencode(name): value for name, value in variables.items()}
    others = {b"PATH": os.fsencode(os.environ["PATH"]), b"JAX_PLATFORMS": b"cpu"}
    command = [sys.executable, "-P", "-c", _NVRTC_PROGRAM]
    done = subprocess.run(command, env=others | ours, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@ext_program.needs_nvrtc
def test_names_need_not_be_utf8(tmp_path):
    home = os.fsencode(tmp_path) + b"/h\xf6me"
    os.mkdir(home)
    os.symlink(os.path.dirname(extension.nvrtc()[0]), home + b"/\xff")
    library = home + b"/\xff/" + os.path.basename(os.fsencode(extension.nvrtc()[0]))
    variables = dict(
        HOME=home,
        CUDA_HOME=home + b"/cuda",
        JAX_FP8GEMM_NVRTC=library,
        JAX_FP8GEMM_DUMP_DIR=home + b"/dump",
        JAX_FP8GEMM_JIT_DEBUG=b"\xff",
    )
    for cached in (False, True):
        output = _run_with(variables)
        assert f"cached: {cached}\n" in output
        assert f"{tmp_path}/h\\xf6me/.cache/jax_fp8gemm (1 kernels)\n" in output
        assert f"({tmp_path}/h\\xf6me/\\xff/libnvrtc.so" in output
    assert len(os.listdir(home + b"/dump")) >= 3


def test_names_in_errors_need_not_be_utf8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xfe"
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    output = _run_with(dict(JAX_FP8GEMM_NVRTC=b"/none/\xff.so", XDG_CACHE_HOME=folder))
    assert "/none/\\xff.so: cannot open shared object file" in output
    assert f"none: others can write {tmp_path}/\\xfe (mode 0777" in output


@pytest.mark.parametrize(
    "path, expected",
    [
        (b"/caf\xc3\xa9", "/caf\u00e9"),
        (b"/\xc3", "/\\xc3"),
        (b"/\xe0\x80\x80\xed\xa0\x80", "/\\xe0\\x80\\x80\\xed\\xa0\\x80"),
        (b"/\xf0\x9f\x98\x80\xf4\x90\x80\x80", "/\U0001f600\\xf4\\x90\\x80\\x80"),
    ],
)
def test_a_name_in_an_error_is_utf8_and_the_rest_escaped(path, expected):
    ext = extension.extension()
    ext.configure(
        source_dir=b"/", cache_dir="", nvrtc_paths=[path], is_debug=False, dump_dir=Path("/")
    )
    with pytest.raises(RuntimeError) as error:
        ext.nvrtc_info()
    assert f"works: {expected}: " in str(error.value)
    assert environment.printable(os.fsdecode(path)) == expected
