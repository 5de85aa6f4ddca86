"""Whose kernels the disk cache takes: those that nobody but this user and root can have written."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
from ext_program import needs_nvrtc, run

from jax_fp8gemm import __main__
from jax_fp8gemm._runtime import backend_info, environment, extension

pytest.importorskip("jax_fp8gemm._ext")

pytestmark = needs_nvrtc

_STRANGER = 12345  # a user and a group of no account
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

# Prints of each kernel whether it came from the disk.
_COMPILE = """
for mode in range({num_kernels}):
    print(ext.compile_quantize(dict(QUANTIZE_CONFIG, input=mode))["from_disk"])
"""


def _compile(cache_dir, num_kernels=1, *, before=""):
    """Whether each kernel came from the disk, and the warnings."""
    code = f"import os\n{before}\n" + _COMPILE.format(num_kernels=num_kernels)
    status, output, error = run(code, cache_dir)
    assert status == 0, error
    return [line == "True" for line in output.split()], error.splitlines()


@pytest.fixture(scope="module")
def good_entry(tmp_path_factory):
    """An entry as the cache writes it: its name and its bytes."""
    folder = tmp_path_factory.mktemp("cache")
    assert _compile(folder) == ([False], [])
    (entry,) = folder.iterdir()
    return entry.name, entry.read_bytes()


@pytest.fixture
def cache(good_entry, tmp_path):
    """A cache with one good entry."""
    return _fill(tmp_path / "cache", good_entry)


def _fill(folder, entry):
    folder.mkdir(mode=0o700)
    name, data = entry
    (folder / name).write_bytes(data)
    (folder / name).chmod(0o600)
    return folder


def _mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o277], ids=oct)
def test_what_the_cache_makes_is_for_its_user_alone(tmp_path, umask):
    outer = tmp_path / "outer"
    assert _compile(outer / "cache", before=f"os.umask({umask})") == ([False], [])
    assert (_mode(outer), _mode(outer / "cache")) == (0o700, 0o700)
    (entry,) = (outer / "cache").iterdir()
    assert _mode(entry) == 0o600
    assert _compile(outer / "cache") == ([True], [])


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777], ids=oct)
def test_a_folder_that_others_may_write_is_refused(cache, mode):
    cache.chmod(mode)
    before = sorted(cache.iterdir())
    found, (warning,) = _compile(cache, num_kernels=2)
    assert found == [False, False]
    assert warning.startswith("jax_fp8gemm: warning: kernels are kept in memory only; cache folder")
    assert f"others can write {cache} (mode {mode:04o}; chmod go-w keeps them out)" in warning
    assert sorted(cache.iterdir()) == before
    cache.chmod(mode & 0o7755)
    assert _compile(cache) == ([True], [])


@needs_root
def test_a_folder_of_another_user_is_refused(cache):
    os.chown(cache, _STRANGER, 0)
    found, (warning,) = _compile(cache, num_kernels=2)
    assert found == [False, False]
    assert f"{cache} belongs to uid {_STRANGER}, which is neither yours nor root's" in warning


def test_a_folder_that_others_could_replace_is_refused(good_entry, tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    cache = _fill(parent / "cache", good_entry)
    parent.chmod(0o777)
    found, (warning,) = _compile(cache)
    assert found == [False] and f"others can write {parent} (mode 0777" in warning
    parent.chmod(0o1777)  # as /tmp
    assert _compile(cache) == ([True], [])


@needs_root
def test_a_folder_that_another_user_or_group_could_replace_is_refused(good_entry, tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    cache = _fill(parent / "cache", good_entry)
    parent.chmod(0o775)
    os.chown(parent, 0, _STRANGER)
    found, (warning,) = _compile(cache)
    assert found == [False] and f"others can write {parent} (mode 0775" in warning
    os.chown(parent, _STRANGER, 0)
    found, (warning,) = _compile(cache)
    assert found == [False] and f"{parent} belongs to uid {_STRANGER}" in warning


def test_a_link_to_the_folder_is_followed_where_all_that_it_passes_is_safe(good_entry, tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    _fill(parent / "cache", good_entry)
    (tmp_path / "absolute").symlink_to(parent)
    (tmp_path / "relative").symlink_to("parent/../absolute/./cache")
    (tmp_path / "loop").symlink_to("loop")
    assert _compile(tmp_path / "absolute" / "cache") == ([True], [])
    assert _compile(tmp_path / "relative") == ([True], [])
    found, (warning,) = _compile(tmp_path / "loop" / "cache")
    assert found == [False] and "Too many levels of symbolic links" in warning
    parent.chmod(0o777)
    found, (warning,) = _compile(tmp_path / "relative")
    assert found == [False] and f"others can write {parent}" in warning


@needs_root
def test_a_link_of_another_user_is_not_followed(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    os.chown(link, _STRANGER, 0, follow_symlinks=False)
    found, (warning,) = _compile(link)
    assert found == [False] and f"{link} belongs to uid {_STRANGER}" in warning


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("group", ".kernel (mode 0660; chmod go-w keeps them out)"),
        ("world", ".kernel (mode 0602; chmod go-w keeps them out)"),
        ("owner", f".kernel belongs to uid {_STRANGER}, which is neither yours nor root's"),
        ("link", ".kernel is a symbolic link"),
        ("fifo", ".kernel is not a regular file"),
    ],
    ids=lambda text: text if text.isalpha() else "",
)
def test_an_entry_that_may_be_another_user_s_is_compiled_anew(
    cache, good_entry, tmp_path, kind, reason
):
    name, data = good_entry
    entry = cache / name
    if kind in ("group", "world"):
        entry.chmod(0o660 if kind == "group" else 0o602)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        entry.unlink()
        entry.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        entry.unlink()
        os.mkfifo(entry, 0o600)
    elif os.geteuid() == 0:
        os.chown(entry, _STRANGER, _STRANGER)
    else:
        pytest.skip("only root can give files away")
    found, (warning,) = _compile(cache)
    assert found == [False] and f"cache entry in {cache}: " in warning and reason in warning
    # What was compiled lies there now.
    assert stat.S_ISREG(entry.lstat().st_mode) and _mode(entry) == 0o600
    assert _compile(cache) == ([True], [])
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == data


@needs_root
def test_users_read_what_an_administrator_compiled(good_entry):
    """Root fills a folder and opens it for reading; others find its kernels, and add none."""
    nvrtc = Path(extension.nvrtc()[0])
    for path in (nvrtc, Path(environment.source_dir())):
        if not all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents):
            pytest.skip(f"another user cannot read {path}")
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        cache = _fill(Path(shared) / "cache", good_entry)
        user = f"os.seteuid({_STRANGER})"
        found, (warning,) = _compile(cache, before=user)  # as root left it
        assert found == [False] and str(cache) in warning and "Permission denied" in warning
        cache.chmod(0o755)
        (cache / good_entry[0]).chmod(0o644)
        assert _compile(cache, before=user) == ([True], [])
        found, (warning,) = _compile(cache, num_kernels=3, before=user)
        assert found == [True, False, False] and "Permission denied" in warning
        assert len(list(cache.iterdir())) == 1


# What Python says of it


@pytest.fixture
def refused(cache, monkeypatch):
    """The package with a cache folder that it refuses."""
    cache.chmod(0o777)
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", str(cache))
    extension.check_cache_dir.cache_clear()
    extension._configure()
    yield cache
    monkeypatch.undo()
    extension.check_cache_dir.cache_clear()
    extension._configure()


def test_a_refused_folder_is_one_warning(refused, recwarn):
    for _ in range(2):
        extension.check_cache_dir()
    (warning,) = recwarn
    assert f"cache folder {refused}: others can write {refused} (mode 0777" in str(warning.message)
    assert "kernels are kept in memory only" in str(warning.message)


@pytest.mark.filterwarnings("ignore:.*cache folder")
@pytest.mark.parametrize("is_warned", [False, True])
def test_info_says_why_a_folder_is_refused(refused, is_warned):
    if is_warned:
        extension.check_cache_dir()
    info = backend_info.backend_info().cache_dir
    assert info.startswith(f"none: others can write {refused} (mode 0777")


def test_precompile_refuses_the_folder_too(refused, capsys):
    assert __main__.main(["precompile"]) == 1
    assert f"others can write {refused} (mode 0777" in capsys.readouterr().out
