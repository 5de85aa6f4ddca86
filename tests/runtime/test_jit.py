"""The JIT, on real kernels and without a GPU: NVRTC, the disk cache, and what ptxas says."""

import concurrent.futures
import multiprocessing
import os
import re
import shutil
import subprocess
import time

import ext_program
import pytest
from ext_program import QUANTIZE_CONFIG
from gated_activations import NAMES, OTHERS

from jax_fp8gemm._runtime import environment, precompile
from jax_fp8gemm._tuning import (
    all_kernels,
    copy_rows_config,
    quantize_config,
    sum_rows_config,
    tile_config,
)
from jax_fp8gemm._tuning.tile import TileConfig

_ext = pytest.importorskip("jax_fp8gemm._ext")


pytestmark = ext_program.needs_nvrtc


def _configure(cache_dir, *, source_dir=None, is_debug=False, dump_dir=""):
    """Points the JIT at `cache_dir` and empties its memory."""
    _ext.configure(
        source_dir=str(source_dir or environment.source_dir()),
        cache_dir=str(cache_dir),
        nvrtc_paths=environment.nvrtc_paths(),
        is_debug=is_debug,
        dump_dir=str(dump_dir),
    )


@pytest.fixture
def cache_dir(tmp_path):
    """An empty cache folder, in use; the settings of the session come back afterwards."""
    _configure(tmp_path / "cache")
    yield tmp_path / "cache"
    _configure(environment.cache_dir())


def _compile():
    report = _ext.compile_quantize(QUANTIZE_CONFIG)
    del report["log"]  # holds the time that ptxas took
    return report


def test_a_kernel_is_compiled_once_and_then_read_from_disk(cache_dir):
    cold = _compile()
    assert not cold["from_disk"] and cold["cubin_bytes"] > 0 and cold["registers"] > 0
    (entry,) = cache_dir.iterdir()
    assert entry.name.startswith(cold["name"]) and entry.suffix == ".kernel"

    _configure(cache_dir)
    start = time.perf_counter()
    hit = _compile()
    seconds = time.perf_counter() - start
    assert hit == {**cold, "from_disk": True}
    # 20 ms is the promise on a quiet machine, 2 ms what it takes; a compilation takes 200 or more.
    assert seconds < 0.1


def test_memory_is_asked_before_the_disk(cache_dir):
    first = _compile()
    shutil.rmtree(cache_dir)
    assert _compile() == first
    assert not cache_dir.exists()


def test_without_a_disk_cache_memory_goes_on(cache_dir):
    first = _compile()
    shutil.rmtree(cache_dir)
    _ext.disable_disk_cache()
    assert _compile() == first
    assert not _ext.compile_quantize(QUANTIZE_CONFIG | dict(mode=1))["from_disk"]
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    "tile, how, rule",
    [
        ((128, 76, 76, 2, 1, 3, 0), {}, "block_n must be a multiple of sub_n, and sub_n 8, 16"),
        ((192, 160, 8, 1, 1, 3, 5), dict(out_f32=True), "num_slabs / 2 must divide the slabs"),
        ((256, 64, 64, 2, 1, 3, 0), dict(grouping=1), "groups of rows must have block_m below 256"),
        ((128, 256, 128, 2, 1, 3, 1), dict(grouping=1), "groups of rows .* need 2 slabs or more"),
        (
            (64, 64, 64, 1, 1, 3, 0),
            dict(grouping=1, out_f32=True, accumulate=True),
            "no accumulate",
        ),
    ],
    ids=str,
)
def test_tiles_of_no_kernel_are_refused(tile, how, rule):
    flags = dict.fromkeys(("is_1d1d", "out_f32", "accumulate", "lhs_e5m2", "rhs_e5m2"), False)
    config = TileConfig(*tile).attributes(**(flags | how), num_sms=1)
    with pytest.raises(ValueError, match=rule):
        _ext.compile_gemm(config)


@pytest.mark.parametrize("bad", [dict(mode=7), dict(mode=-1), dict(input=100), dict(source=9)])
def test_configs_of_no_kernel_are_refused(bad):
    with pytest.raises(ValueError, match=r"mode must be 0..6, input 0..[24] and source 0..5"):
        _ext.compile_quantize(QUANTIZE_CONFIG | bad)


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "append", "other_format"])
def test_a_damaged_entry_is_rebuilt(cache_dir, damage):
    cold = _compile()
    (entry,) = cache_dir.iterdir()
    good = entry.read_bytes()
    bad = {
        "truncate": good[:-100],
        "empty": b"",
        "flip": good[:-100] + bytes([good[-100] ^ 1]) + good[-99:],
        "append": good + b"x",
        "other_format": b"FP8GEMM0" + good[8:],
    }[damage]
    entry.write_bytes(bad)

    _configure(cache_dir)
    assert _compile() == cold
    assert [file.name for file in cache_dir.iterdir()] == [entry.name]
    _configure(cache_dir)
    assert _compile() == {**cold, "from_disk": True}


def test_an_entry_that_cannot_be_read_is_compiled_again(cache_dir):
    cold = _compile()
    (entry,) = cache_dir.iterdir()
    entry.unlink()
    entry.mkdir()
    _configure(cache_dir)
    assert _compile() == cold


def test_a_changed_source_is_another_entry(cache_dir, tmp_path):
    _compile()
    source_dir = tmp_path / "cuda"
    shutil.copytree(environment.source_dir(), source_dir)
    for edit in ("\n// changed\n", "\n// changed again\n"):
        with open(source_dir / "quantize" / "quantize.cuh", "a") as file:
            file.write(edit)
        _configure(cache_dir, source_dir=source_dir)
        assert not _compile()["from_disk"]
    assert len(list(cache_dir.iterdir())) == 3


@pytest.mark.parametrize("change", ["add", "remove", "rename", "move", "exchange"])
def test_other_source_files_are_another_entry(cache_dir, tmp_path, change):
    """Files that no kernel includes: the key knows all that a kernel could include."""
    source_dir = tmp_path / "cuda"
    shutil.copytree(environment.source_dir(), source_dir)
    first, second = source_dir / "quantize" / "first.cuh", source_dir / "ptx" / "second.cuh"
    first.write_text("// first\n")
    second.write_text("// second\n")
    _configure(cache_dir, source_dir=source_dir)
    cold = _compile()
    assert not cold["from_disk"]
    _configure(cache_dir, source_dir=source_dir)
    assert _compile() == {**cold, "from_disk": True}

    if change == "add":
        (source_dir / "gemm" / "third.cuh").write_text("// third\n")
    elif change == "remove":
        first.unlink()
    elif change == "rename":
        first.rename(first.with_name("other.cuh"))
    elif change == "move":
        first.rename(source_dir / "ptx" / first.name)
    else:
        first.write_text("// second\n")
        second.write_text("// first\n")
    _configure(cache_dir, source_dir=source_dir)
    assert _compile() == cold
    assert len(list(cache_dir.iterdir())) == 2


def test_an_unwritable_cache_is_warned_of_once(tmp_path, capfd):
    blocker = tmp_path / "file"
    blocker.write_text("a folder cannot be made below a file")
    # In a process of its own: the warning comes once a process.
    code = f"""
        for config in ({QUANTIZE_CONFIG}, {QUANTIZE_CONFIG | dict(mode=1)}):
            assert not ext.compile_quantize(config)["from_disk"]
        """
    result = ext_program.start(code, blocker / "cache")
    assert result.wait() == 0
    error = capfd.readouterr().err
    assert error.count("jax_fp8gemm: warning: kernels are kept in memory only") == 1
    assert str(blocker) in error


def test_processes_race_on_one_cache(tmp_path):
    code = f"""
        import sys
        sys.stdin.readline()
        report = ext.compile_quantize({QUANTIZE_CONFIG})
        print(report["name"], report["cubin_bytes"], flush=True)
        """
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    workers = [ext_program.start(code, tmp_path, **pipes) for _ in "abc"]
    for worker in workers:  # all are waiting: let them go at once
        worker.stdin.write(b"\n")
        worker.stdin.flush()
    outputs = {worker.communicate()[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len(outputs) == 1
    (entry,) = tmp_path.iterdir()
    _configure(tmp_path)
    try:
        assert _compile()["from_disk"]
    finally:
        _configure(environment.cache_dir())
    assert outputs == {f"{_compile()['name']} {_compile()['cubin_bytes']}\n".encode()}


def test_threads_compile_a_kernel_once(cache_dir, capfd):
    _configure(cache_dir, is_debug=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: _compile(), range(4)))
    assert all(report == reports[0] for report in reports)
    error = capfd.readouterr().err
    assert error.count("compiled by NVRTC") == 1
    assert error.count("in memory") == 3


def test_debug_and_dump_say_what_was_compiled(cache_dir, tmp_path, capfd):
    dump_dir = tmp_path / "dump"
    _configure(cache_dir, is_debug=True, dump_dir=dump_dir)
    report = _compile()
    pattern = (
        rf"jit: {report['name']}: compiled by NVRTC \d+\.\d+ in \d\.\d+ s; \d+ registers, 0 sp"
    )
    assert re.search(pattern, capfd.readouterr().err)
    assert "quantize.cuh" in (dump_dir / f"{report['name']}.cu").read_text()
    assert (dump_dir / f"{report['name']}.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "registers" in (dump_dir / f"{report['name']}.log").read_text()
    if shutil.which("nvdisasm") or shutil.which("cuobjdump"):
        assert "EXIT" in (dump_dir / f"{report['name']}.sass").read_text()


def test_a_source_that_does_not_compile_is_an_error_each_time(cache_dir, tmp_path):
    source_dir = tmp_path / "cuda"
    (source_dir / "quantize").mkdir(parents=True)
    (source_dir / "quantize" / "quantize.cuh").write_text("this is not CUDA")
    _configure(cache_dir, source_dir=source_dir)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot compile .*\n.*quantize\.cuh\(1\): error"):
            _compile()
    assert not cache_dir.exists()


def test_a_config_must_have_exactly_the_members_of_the_kernel():
    with pytest.raises(KeyError, match="pow2_scale"):
        _ext.compile_quantize({k: v for k, v in QUANTIZE_CONFIG.items() if k != "pow2_scale"})
    with pytest.raises(KeyError, match="12 members; got 13"):
        _ext.compile_quantize(QUANTIZE_CONFIG | {"more": 1})


# What ptxas says of every kernel that can be chosen


def _assert_clean(reports):
    faults = [
        f"{r.name}: {r.spill_bytes} bytes spilled; {r.warnings}"
        for r in reports
        if r.spill_bytes or r.warnings
    ]
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="module")
def compile_all():
    """Compiles kernels in one process a core: NVRTC compiles one program at a time in each."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        yield lambda *arguments: list(pool.map(*arguments))


def test_no_gemm_kernel_spills_or_loses_its_registers(compile_all):
    reports = compile_all(
        precompile.compile_gemm, list(all_kernels.gemm_kernels(132, with_clusters=True))
    )
    assert len({report.name for report in reports}) == len(reports) > 0
    _assert_clean(reports)


def test_formats_do_not_change_what_ptxas_says(compile_all):
    most = max(config.block_m * config.block_n for config in tile_config.CONFIGS)
    kernels = all_kernels.gemm_kernels(132, all_formats=True, with_clusters=True)
    large = [k for k in kernels if k["block_m"] * k["block_n"] == most and not k["out_f32"]]
    assert len({(k["grouping"], k["lhs_e5m2"], k["rhs_e5m2"]) for k in large}) == 12
    _assert_clean(compile_all(precompile.compile_gemm, large))


@pytest.mark.parametrize("is_other", [False, True], ids=("e4m3", "e5m2 and powers of two"))
def test_no_quantize_kernel_spills(compile_all, is_other):
    kernels = list(quantize_config.kernel_configs(e5m2=is_other, pow2_scale=is_other))
    reports = compile_all(precompile.compile_quantize, kernels)
    assert len({report.name for report in reports}) == len(reports)
    swiglu = "swiglu_quantize", "swiglu_grad_quantize", "weighted_swiglu_grad_quantize"
    for op in ("quantize", *swiglu):
        assert any(report.name.startswith(f"{op}_row_column_") for report in reports) == (
            op == "quantize"
        )
        assert any(report.name.startswith(f"{op}_ragged_row_column_bf16_") for report in reports)
    _assert_clean(reports)


def test_no_kernel_that_copies_rows_spills(compile_all):
    reports = compile_all(precompile.compile_copy_rows, list(copy_rows_config.kernel_configs()))
    assert {report.name for report in reports} == {"copy_rows_by_16", "copy_rows_by_1"}
    _assert_clean(reports)
    # With more, an SM would hold fewer than the 6 CTAs that row_copier.cuh counts on.
    assert all(report.registers <= 40 for report in reports)


def test_no_kernel_that_adds_rows_spills(compile_all):
    reports = compile_all(precompile.compile_sum_rows, list(sum_rows_config.kernel_configs()))
    assert len({report.name for report in reports}) == len(reports) == 6
    _assert_clean(reports)
    # With more, an SM would hold fewer than the 5 CTAs that row_adder.cuh counts on.
    assert all(report.registers <= 96 for report in reports)


@pytest.mark.parametrize("activation", OTHERS, ids=NAMES)
def test_no_kernel_of_another_activation_spills(compile_all, activation):
    # The largest ones: both results of a gradient hold all that the others hold, and more. With
    # weights a kernel of rows alone can spill where one of both does not.
    kinds = [("swiglu_grad", "row_column", False), ("swiglu_grad", "row_column", True)]
    kinds += [("weighted_swiglu_grad", mode, False) for mode in ("row", "row_column")]
    configs = [
        quantize_config.attributes(
            mode,
            dtype,
            is_ragged=True,
            source=source,
            activation=activation,
            e5m2=is_other,
            pow2_scale=is_other,
        )
        for dtype in ("bfloat16", "float32")
        for source, mode, is_other in kinds
    ]
    reports = compile_all(precompile.compile_quantize, configs)
    assert len({report.name for report in reports}) == 8
    _assert_clean(reports)
