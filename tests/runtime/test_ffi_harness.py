"""The launch code without a GPU: tests/ffi_harness calls the handlers as XLA does, on a fake driver
that refuses what a real one would, under AddressSanitizer and UndefinedBehaviorSanitizer.

JAX_FP8GEMM_FUZZ multiplies the number of random calls; JAX_FP8GEMM_FUZZ_SEED sets the seed
(`make fuzz-ffi`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import builder
import golden
import golden_cases
import launch_model
import nvrtc_check
import pytest

from jax_fp8gemm._runtime import environment as _environment
from jax_fp8gemm._runtime import extension

pytestmark = pytest.mark.skipif(
    not builder.FFI.exists(), reason="needs the checkout that the tests came from"
)

_FACTOR = int(os.environ.get("JAX_FP8GEMM_FUZZ", "1"))
_SEED = int(os.environ.get("JAX_FP8GEMM_FUZZ_SEED", "1"))
_VARIANT = os.environ.get("JAX_FP8GEMM_HARNESS", "asan")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The arguments of the harness that name its inputs."""
    return golden.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def folder():
    if (fault := builder.missing_tool(_VARIANT)) is not None:
        pytest.skip(fault)
    return builder.build(_VARIANT)


@pytest.fixture
def run(folder, inputs, tmp_path):
    """Runs a command of the harness; returns what it printed."""

    def run(command, **arguments):
        words = [f"{name}={value}" for name, value in arguments.items()]
        line = [folder / "harness", command, *inputs, f"cache={tmp_path / 'cache'}", *words]
        limit = 60 * _FACTOR
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0, f"{command} {words}\n{done.stdout}{done.stderr}"
        print(*words, done.stdout)
        return done.stdout

    return run


_OPS = [
    "gemm",
    "quantizing_gemm",
    "grouped_gemm",
    "grouped_gated_gemm",
    "grouped_wgrad",
    "quantize",
    "copy_rows",
    "sum_rows",
]


def test_xla_may_record_every_handler_into_a_command_buffer(run):
    lines = run("handlers").splitlines()
    assert [line.split()[0] for line in lines] == _OPS
    assert all(line.endswith(" command-buffer") for line in lines)


# Seeds that differ find different things; the same ones are the same calls.
@pytest.mark.parametrize("part", range(2))
def test_random_calls_succeed_or_fail_in_a_sentence(run, part):
    output = run("random", seed=_SEED * 1000 + part, calls=4000 * _FACTOR)
    legal, mutated = output.splitlines()
    assert legal == f"legal calls: {2000 * _FACTOR} succeeded, 0 failed with 0 kinds of errors"
    # The mutations reach many errors, and some calls that are still right.
    succeeded, _, kinds = map(int, re.findall(r"\d+", mutated))
    assert succeeded > 20 and kinds > 100


def test_no_config_ends_the_process(run):
    output = run("configs", seed=_SEED, calls=6000 * _FACTOR)
    succeeded, failed, kinds = map(int, re.findall(r"\d+", output))
    assert succeeded > 20 and failed > 4000 * _FACTOR and kinds > 40


def test_tensor_maps_are_refused_as_the_driver_refuses_them(run):
    encoded, refused = map(int, re.findall(r"\d+", run("tensor_maps", seed=_SEED, calls=20_000)))
    assert encoded > 500 and encoded + refused == 20_000


def test_every_driver_and_nvrtc_call_may_fail(run):
    output = run("faults")
    cases, errors, _, functions = map(int, re.findall(r"\d+", output))
    assert cases == len(golden_cases.all_cases())
    # 10 of the driver, 7 of NVRTC.
    assert functions == 17 and errors > 5 * cases


def test_every_call_of_opening_the_driver_may_fail(run):
    # cuGetProcAddress for each function of Driver, then these two; they are followed by others.
    num_functions = (builder.FFI / "driver" / "driver.h").read_text().count("  CUresult (*cu")
    expected = ["cuGetProcAddress"] * num_functions + ["cuInit", "cuDriverGetVersion"]
    numbers = range(1, len(expected) + 2)
    failed = [run("opening", calls=nth).strip() for nth in numbers]
    assert failed == [*expected, "cuCtxGetDevice"]


def test_a_child_opens_the_driver_that_a_thread_of_its_parent_was_opening(run):
    assert run("fork") == "fork: the child's call succeeded\n"


def test_threads_share_kernels_and_devices(run):
    output = run("threads", seed=_SEED, threads=8, calls=2000 * _FACTOR)
    assert "8 shared" in output and f"made {2000 * _FACTOR} calls" in output


# Golden launches


@pytest.fixture(scope="module")
def launches(folder, inputs):
    return golden.record(folder / "harness", inputs)


def test_launches_are_those_that_are_checked_in(launches):
    # `make golden-launches` writes the file anew where a change is meant.
    expected = {}
    for name, launch in json.loads(golden.FILE.read_text()).items():
        params = launch.pop("params") | {k: v for k, v in launch.items() if k != "launch"}
        expected[name] = launch["launch"] | {"params": params}
    assert launches == expected


@pytest.mark.parametrize("op", _OPS)
def test_launches_are_what_follows_from_shapes_and_config(launches, op):
    cases = [case for case in golden_cases.all_cases() if case.op == op]
    assert len(cases) >= 12
    for case in cases:
        launch, expected = launches[case.name], launch_model.expected(case)
        params = {name: launch["params"][name] for name in expected["params"]}
        assert {name: launch[name] for name in expected} | {"params": params} == expected, case.name


# Host and device structs


def _nvrtc_path():
    try:
        return extension.nvrtc()[0]
    except RuntimeError as error:
        pytest.skip(str(error))


def _host_compiles(folder, list_folder):
    flags = [*builder.compile_flags("plain"), f"-I{folder}"]
    source = builder.FOLDER / "host_layout.cc"
    # The list that is included is the first that is found.
    command = ["g++", f"-iquote{list_folder}", *flags, "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=source.read_text(), capture_output=True, text=True)
    return done.returncode == 0, done.stderr


def test_host_and_device_agree_on_structs_and_constants(folder):
    ok, log = _host_compiles(folder, builder.FOLDER)
    assert ok, log
    folders = [Path(_environment.source_dir()), builder.FOLDER]
    ok, log = nvrtc_check.compile_log(_nvrtc_path(), builder.FOLDER / "device_layout.cu", folders)
    assert ok, log


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("MEMBER(GemmParams, raster, 816)", "MEMBER(GemmParams, raster, 820)"),
        ("lhs_values, lhs_columns)", "lhs_values, lhs_columns, one_more)"),
        ("STRUCT(QuantizeParams, 128", "STRUCT(QuantizeParams, 120"),
        ("CONSTANT(2048, kPieceBytes", "CONSTANT(1024, kPieceBytes"),
        ("CONSTANT(1024, kMaxGroups", "CONSTANT(512, kMaxGroups"),
    ],
)
def test_a_difference_is_found_by_both_compilers(folder, tmp_path, right, wrong):
    text = (builder.FOLDER / "layout_list.h").read_text()
    flat = re.sub(r"\n +", " ", text)
    assert right in flat
    (tmp_path / "layout_list.h").write_text(flat.replace(right, wrong))
    ok, log = _host_compiles(folder, tmp_path)
    assert not ok and "layout_list.h" in log
    source = tmp_path / "device_layout.cu"
    source.write_text((builder.FOLDER / "device_layout.cu").read_text())
    folders = [tmp_path, Path(_environment.source_dir())]
    ok, log = nvrtc_check.compile_log(_nvrtc_path(), source, folders)
    assert not ok and "layout_list.h" in log


# What the CTAs of a cluster send each other

_SPLIT_K_LAYOUT = builder.FOLDER / "split_k_layout.cu"


def test_what_a_cluster_sends_arrives_where_it_is_added():
    folders = [Path(_environment.source_dir())]
    ok, log = nvrtc_check.compile_log(_nvrtc_path(), _SPLIT_K_LAYOUT, folders)
    assert ok, log


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("lane * kVector + e * 32 * kVector", "lane * kVector + e * 16 * kVector"),
        ("warp * kShares + share", "warp + share"),
        ("2 * (thread / kVector % 4) + thread % 2", "2 * (thread % 4) + thread % 2"),
        ("thread / 2 % (kVector / 2) * 8", "thread / 2 % (kVector / 2) * 4"),
        ("num_k_blocks * (kSlot + kRows) * 4", "num_k_blocks * (kSlot + 3 * kRows) * 4"),
    ],
)
def test_another_place_is_found(tmp_path, right, wrong):
    source = Path(_environment.source_dir())
    text = (source / "gemm" / "split_k_adder.cuh").read_text()
    assert text.count(right) == 1
    (tmp_path / "gemm").mkdir()
    (tmp_path / "gemm" / "split_k_adder.cuh").write_text(text.replace(right, wrong))
    ok, log = nvrtc_check.compile_log(_nvrtc_path(), _SPLIT_K_LAYOUT, [tmp_path, source])
    assert not ok and "static assertion failed" in log


# The extension on the fake driver


def test_the_extension_describes_the_devices_of_a_driver(tmp_path):
    if (fault := builder.missing_tool("plain")) is not None:
        pytest.skip(fault)
    # The linker reads LD_LIBRARY_PATH when a process starts.
    folder = builder.build_fakes("plain")
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_FP8GEMM_NVRTC": str(folder / "libnvrtc.so.13"),
        "JAX_FP8GEMM_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-P", "-m", "jax_fp8gemm", "info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("Fake H200 (sm90, 132 SMs)") == 2
    assert re.search(r"driver .*CUDA 13\.0", done.stdout), done.stdout
    # The driver and NVRTC are good, so the only reason is JAX's.
    assert re.search(r"cuda kernels +off: jax sees no NVIDIA GPU", done.stdout), done.stdout
