"""The extension's answers: which targets it has, and why they cannot run on some machine."""

import os
import re
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ext_program import QUANTIZE_CONFIG
from machines import H200, device, fresh_answers, pretend

from jax_fp8gemm import EXPORT_CHECKS
from jax_fp8gemm._runtime import backend_info, extension, precompile
from jax_fp8gemm._runtime import environment as _environment

_ext = pytest.importorskip("jax_fp8gemm._ext")
__all__ = ["fresh_answers"]  # a fixture of all tests here


def test_the_targets_have_the_three_stages():
    registrations = _ext.registrations()
    assert set(registrations) == {
        extension.GEMM_TARGET,
        extension.QUANTIZING_GEMM_TARGET,
        extension.GROUPED_GEMM_TARGET,
        extension.GROUPED_GATED_GEMM_TARGET,
        extension.GROUPED_WGRAD_TARGET,
        extension.QUANTIZE_TARGET,
        extension.SWIGLU_QUANTIZE_TARGET,
        extension.SWIGLU_GRAD_QUANTIZE_TARGET,
        extension.WEIGHTED_SWIGLU_GRAD_QUANTIZE_TARGET,
        extension.GATHER_QUANTIZE_TARGET,
        extension.COPY_ROWS_TARGET,
        extension.SUM_ROWS_TARGET,
    }
    checks = map(jax.export.DisabledSafetyCheck.custom_call, registrations)
    assert set(EXPORT_CHECKS) == set(checks)
    for stages in registrations.values():
        assert set(stages) == {"instantiate", "prepare", "execute"}
        assert all(type(handler).__name__ == "PyCapsule" for handler in stages.values())


def test_the_targets_for_a_cpu_have_one_handler():
    assert extension.has_cpu_targets
    registrations = _ext.cpu_registrations()
    assert set(registrations) == {extension.QUANTIZE_BLOCKS_TARGET}
    assert all(type(handler).__name__ == "PyCapsule" for handler in registrations.values())


def test_registering_again_changes_nothing():
    extension.register()


def test_the_runtime_api_version_is_read_from_the_headers_of_jaxlib():
    major, minor = extension._runtime_api()
    assert major == 0 and minor >= 3
    assert (_ext.XLA_FFI_API_MAJOR, _ext.XLA_FFI_API_MINOR) <= (major, minor)


def test_a_jaxlib_older_than_the_extension_is_refused(monkeypatch):
    assert extension._api_fault(0, 3, 0, 3) is None
    assert extension._api_fault(0, 3, 0, 5) is None
    fault = extension._api_fault(0, 4, 0, 3)
    assert re.search(r"built for XLA FFI API 0\.4 and this jaxlib provides 0\.3\. Update", fault)
    assert extension._api_fault(1, 0, 0, 9) is not None

    monkeypatch.setattr(_ext, "XLA_FFI_API_MINOR", extension._runtime_api()[1] + 1)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", pytest.fail)
    extension.register()  # registers nothing: XLA's backend would not start
    assert "XLA FFI API" in extension.unavailable_reason()


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (dict(devices=[H200]), None),
        (dict(devices=[]), "needs an sm90a device; got no GPU"),
        (
            dict(devices=[device("NVIDIA A100", (8, 0))]),
            r"needs an sm90a device; got NVIDIA A100 \(sm80\)",
        ),
        # One of two is enough to fail: a computation may be placed on either.
        (dict(devices=[H200, device("NVIDIA B200", (10, 0))]), r"got NVIDIA B200 \(sm100\)"),
        (
            dict(devices=[H200], cuda_version=(12, 8)),
            r"NVRTC 13\.0 \(libnvrtc\.so\.13\) needs a driver for CUDA 13; got one for CUDA 12\.8",
        ),
        (dict(devices=[H200], cuda_version=(13, 2), nvrtc=("libnvrtc.so.12", 12, 9)), None),
    ],
)
def test_unavailable_reason_names_what_is_wrong(monkeypatch, machine, reason):
    machine = dict(machine)
    pretend(monkeypatch, *machine.pop("devices"), **machine)
    if reason is None:
        assert extension.unavailable_reason() is None
    else:
        assert re.search(reason, extension.unavailable_reason())


def test_without_a_driver_the_reason_says_so_and_132_sms_are_assumed(monkeypatch):
    def no_driver():
        raise RuntimeError("no NVIDIA driver: cannot open libcuda.so.1")

    monkeypatch.setattr(_ext, "device_info", no_driver)
    assert extension.unavailable_reason() == "no NVIDIA driver: cannot open libcuda.so.1"
    assert extension.num_sms() == 132


def test_num_sms_is_the_first_device_s(monkeypatch):
    pretend(monkeypatch, device("NVIDIA H100 PCIe", (9, 0)))
    assert extension.num_sms() == 108


def test_products_use_fewer_sms_where_the_environment_says_so(monkeypatch):
    pretend(monkeypatch, device("NVIDIA H100 PCIe", (9, 0)))
    for value, expected in (("96", 96), ("200", 108), ("", 108)):
        extension.num_sms.cache_clear()
        monkeypatch.setenv("JAX_FP8GEMM_NUM_SMS", value)
        assert extension.num_sms() == expected
    for value in ("3", "-96", "all", "9.5"):
        extension.num_sms.cache_clear()
        monkeypatch.setenv("JAX_FP8GEMM_NUM_SMS", value)
        message = f"JAX_FP8GEMM_NUM_SMS must be an integer of at least 4; got {value}"
        with pytest.raises(ValueError, match=message):
            extension.num_sms()


def test_without_the_extension_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(extension, "_ext", None)
    monkeypatch.setattr(extension, "_ext_fault", "No module named '_ext'", raising=False)
    assert re.search(
        r"cannot be imported \(No module .*pip install", extension.unavailable_reason()
    )
    assert extension.num_sms() == 132
    with pytest.raises(RuntimeError, match="cannot be imported"):
        precompile.compile_gemm({})
    assert "off: the extension" in str(backend_info.backend_info())


def test_a_jaxlib_without_headers_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    assert (
        extension.unavailable_reason() == f"jaxlib must have its header {header}; got No such file "
        "or directory"
    )
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n")
    extension.unavailable_reason.cache_clear()
    assert "must define XLA_FFI_API_MAJOR and _MINOR; got ['0']" in str(
        extension.unavailable_reason()
    )


# Stand-ins for what a machine may have


def _build_library(path, source):
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="builds a library of its own")

_NO_GPU_DRIVER = """
    #include <string.h>
    static int init(unsigned flags) { return 100; }
    static int text(int error, const char** text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
    int cuGetProcAddress_v2(const char* symbol, void** function) {
      *function = strstr(symbol, "cuGetError") ? (void*)text : (void*)init;
      return 0;
    }
"""


@needs_cc
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int x;", r"must support CUDA 12\.0 or newer; it has no cuGetProcAddress_v2\. Update"),
        ("int cuGetProcAddress_v2() { return 500; }", "it has no cuTensorMapEncodeTiled"),
        (_NO_GPU_DRIVER, r"needs a GPU that .* can use; cuInit gave CUDA_ERROR_NO_DEVICE \(100\)"),
    ],
    ids=["older_than_12", "function_missing", "no_device"],
)
def test_an_unusable_driver_is_a_reason_and_no_crash(tmp_path, source, reason):
    _build_library(tmp_path / "libcuda.so.1", source)
    # The linker reads LD_LIBRARY_PATH when a process starts.
    command = [sys.executable, "-P", "-m", "jax_fp8gemm", "info"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert re.search(f"cuda kernels  off: .*{reason}", output.stdout)


# NVRTC


def _configure_nvrtc(*paths, cache_dir=""):
    _ext.configure(
        source_dir=_environment.source_dir(),
        cache_dir=str(cache_dir),
        nvrtc_paths=[str(path) for path in paths],
        is_debug=False,
        dump_dir="",
    )


def test_a_missing_nvrtc_is_named_with_every_place_tried(tmp_path, monkeypatch):
    garbage = tmp_path / "libnvrtc.so.13"
    garbage.write_text("not a library")
    missing = tmp_path / "none" / "libnvrtc.so.13"
    _configure_nvrtc(garbage, missing)
    with pytest.raises(RuntimeError, match="none of 2 candidates works") as error:
        _ext.nvrtc_info()
    assert f"{garbage}: " in str(error.value) and f"{missing}: " in str(error.value)
    assert "JAX_FP8GEMM_NVRTC" in str(error.value)

    info = dict(cuda_version=(13, 0), devices=[H200])
    monkeypatch.setattr(_ext, "device_info", lambda: info)
    assert "none of 2 candidates works" in extension.unavailable_reason()
    with pytest.raises(RuntimeError, match="none of 2 candidates works"):
        _ext.compile_quantize(QUANTIZE_CONFIG)


def _fake_nvrtc(path, major, minor, functions):
    source = f"int nvrtcVersion(int* a, int* b) {{ *a = {major}; *b = {minor}; return 0; }}\n"
    source += "".join(f"int {function}() {{ return 0; }}\n" for function in functions)
    _build_library(path, source)


@needs_cc
def test_an_old_nvrtc_is_refused_with_its_version(tmp_path):
    functions = (
        "nvrtcGetErrorString nvrtcCreateProgram nvrtcDestroyProgram nvrtcCompileProgram "
        "nvrtcGetProgramLogSize nvrtcGetProgramLog nvrtcGetCUBINSize nvrtcGetCUBIN"
    ).split()
    _fake_nvrtc(tmp_path / "old.so", 11, 8, functions)
    _configure_nvrtc(tmp_path / "old.so")
    with pytest.raises(RuntimeError, match=r"is NVRTC 11\.8; the kernels need 12\.\d+ or newer"):
        _ext.nvrtc_info()

    _fake_nvrtc(tmp_path / "part.so", 13, 0, functions[:-1])
    _configure_nvrtc(tmp_path / "part.so", tmp_path / "old.so")
    with pytest.raises(RuntimeError, match=r"part\.so: has no nvrtcGetCUBIN; .*NVRTC 11\.8"):
        _ext.nvrtc_info()


# Handlers: XLA's CPU backend runs Instantiate, and refuses Execute, which wants a CUDA stream


@pytest.fixture
def quantize_on_cpu():
    """Calls the handlers of jax_fp8gemm_quantize in mode "row" through XLA:CPU."""
    stages = _ext.registrations()[extension.QUANTIZE_TARGET]
    target = "jax_fp8gemm_quantize_on_cpu"
    stages = {stage: stages[stage] for stage in ("instantiate", "execute")}
    jax.ffi.register_ffi_target(target, stages, platform="cpu")
    outs = (
        jax.ShapeDtypeStruct((8, 128), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((8, 1), jnp.float32),
    )

    def call(**config):
        config = QUANTIZE_CONFIG | config
        attributes = {
            name: np.int32(value) if isinstance(value, int) else value
            for name, value in config.items()
            if value is not None
        }
        quantize = jax.jit(lambda x: jax.ffi.ffi_call(target, outs)(x, config=attributes))
        with jax.default_device(jax.devices("cpu")[0]):
            return quantize(jnp.ones((8, 128), jnp.bfloat16))

    return call


def test_instantiate_compiles_and_execute_fails_without_a_gpu(quantize_on_cpu, tmp_path):
    _configure_nvrtc(*_environment.nvrtc_paths(), cache_dir=tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError, match="GPU context is not available"):
        quantize_on_cpu()
    (entry,) = tmp_path.iterdir()
    assert entry.name.startswith("quantize_row_bf16")


def test_a_bad_attribute_is_an_error_and_not_the_end(quantize_on_cpu):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"quantize: mode must be .*; got mode 9"):
        quantize_on_cpu(mode=9)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ragged must go with mode column, row_c"):
        quantize_on_cpu(ragged=1)
    message = "swiglu_grad_quantize: mode must be row, or one of columns with ragged; got mode "
    for mode, ragged, name in ((3, 0, "block"), (1, 0, "column")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message + name):
            quantize_on_cpu(source=2, mode=mode, ragged=ragged)
    message = "padded must go with source 0 and without ragged; got source "
    for mode, source, ragged in ((0, 1, 0), (1, 0, 1)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{message}{source}, ragged {ragged}"):
            quantize_on_cpu(mode=mode, source=source, ragged=ragged, padded=1)
    message = "paired must go with source 2 or 5 and input 0; got source "
    for source, input_ in ((1, 0), (2, 2)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{message}{source}, input {input_}"):
            quantize_on_cpu(source=source, input=input_, paired=1)
    message = "weighted_swiglu_grad_quantize: ragged must be 1; got 0, mode row"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        quantize_on_cpu(source=5, mode=0, ragged=0)
    message = r"weighted_swiglu_grad_quantize: input must be 0 or 2 \(bf16, f32\); got 1"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        quantize_on_cpu(source=5, mode=0, ragged=1, input=1)
    for config, message in (
        (dict(more=1), "config must be a dictionary of 12 integers"),
        (dict(mode=None, model=0), "config must have an i32 mode; got model"),
        (dict(mode=np.int64(0)), "config must have an i32 mode; got mode"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            quantize_on_cpu(**config)


def test_instantiate_without_nvrtc_is_an_error_each_time(quantize_on_cpu):
    _configure_nvrtc("/none/libnvrtc.so")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"NVRTC .* or newer is needed"):
            quantize_on_cpu()


# Warnings


def test_the_fallback_is_warned_of_once_for_each_reason():
    with pytest.warns(RuntimeWarning, match="reference runs instead: no luck$"):
        extension.warn_once("no luck")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extension.warn_once("no luck")
    with pytest.warns(RuntimeWarning, match="another"):
        extension.warn_once("another")


def test_an_unusable_cache_folder_is_only_a_warning(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("JAX_FP8GEMM_CACHE_DIR", str(blocker / "cache"))
    extension._configure()
    pretend(monkeypatch, H200)
    with pytest.warns(RuntimeWarning, match=f"cache folder {blocker}/cache: .*in memory only"):
        assert extension.unavailable_reason() is None
