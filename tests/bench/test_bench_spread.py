"""`bench spread`: what it writes of a GPU, and what pages say of several."""

import dataclasses
import json
import sys
import types

import jax.numpy as jnp
import pytest
from fake_clock import fake_rounds

import benchmarks
from benchmarks import spread, warm_deepgemm
from benchmarks.families.all_cases import cases_of
from benchmarks.pages import machines, readme, results
from benchmarks.peers import AbsentError
from benchmarks.problem import Shape
from benchmarks.timing import nvml
from benchmarks.timing.queues import jax_queue
from benchmarks.timing.timer import Call

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU on which our calls take 10 us and DeepGEMM's the time that is set, in two rows."""
    gpu = types.SimpleNamespace(hash="a1", deepgemm_us=9.0, is_absent=False)

    def peer():
        if gpu.is_absent:
            raise AbsentError("not here")
        x = jnp.ones(2)
        return Call(lambda: x + 1, jax_queue())  # no name of a kernel: the peer's clock

    def cases(family, shapes):
        found = cases_of(family, [Shape(40, 128, 256), Shape(8, 128, 256)])
        return [dataclasses.replace(case, peers={"deepgemm": peer}) for case in found]

    monkeypatch.setattr(spread, "cases_of", cases)
    monkeypatch.setattr(spread, "Rounds", lambda *_: fake_rounds(10.0, gpu.deepgemm_us))
    monkeypatch.setattr(spread, "gpu_hash", lambda: gpu.hash)
    monkeypatch.setattr(spread, "copy_gbps", lambda: 4200.4)
    monkeypatch.setattr(spread.extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(spread, "source_commit", lambda: {"commit": "abc", "dirty": False})
    return gpu


def measure(file, *options: str) -> int:
    return benchmarks.main(["spread", "--families", "dense", "--out", str(file), *options])


def test_every_gpu_has_an_entry(fake_gpu, tmp_path):
    file = tmp_path / "machines.json"
    assert measure(file) == 0
    fake_gpu.hash, fake_gpu.deepgemm_us = "b2", 11.0
    assert measure(file) == 0
    content = json.loads(file.read_text())
    first, second = content["machines"]
    assert (first["machine"], first["means"], first["copy_gbps"]) == ("a1", {"dense": 0.9}, 4200)
    assert (second["machine"], second["means"]) == ("b2", {"dense": 1.1})
    assert {"date", "commit", "dirty", "versions", "rounds", "calls"} <= first.keys()
    assert [(row["machine"], row["m"], row["peers"]) for row in content["rows"]] == [
        *(("a1", m, {"deepgemm": 9.0}) for m in (40, 8)),
        *(("b2", m, {"deepgemm": 11.0}) for m in (40, 8)),
    ]


def test_a_gpu_that_ran_before_has_its_last_run(fake_gpu, tmp_path):
    file = tmp_path / "machines.json"
    for hash_, us in (("a1", 9.0), ("b2", 10.0), ("a1", 12.0)):
        fake_gpu.hash, fake_gpu.deepgemm_us = hash_, us
        assert measure(file) == 0
    content = json.loads(file.read_text())
    assert {m["machine"]: m["means"]["dense"] for m in content["machines"]} == {"b2": 1, "a1": 1.2}
    assert len(content["rows"]) == 4


def test_files_of_several_machines_become_one(fake_gpu, tmp_path):
    files = [tmp_path / name for name in ("first.json", "second.json")]
    for file, fake_gpu.hash in zip(files, ("a1", "b2"), strict=True):
        assert measure(file) == 0
    both = tmp_path / "both.json"
    assert measure(both, "--add", *map(str, files)) == 0
    content = json.loads(both.read_text())
    assert [machine["machine"] for machine in content["machines"]] == ["a1", "b2"]
    assert len(content["rows"]) == 4


def test_a_row_without_deepgemm_is_no_success(fake_gpu, tmp_path):
    fake_gpu.is_absent = True
    file = tmp_path / "machines.json"
    assert measure(file) == 1
    content = json.loads(file.read_text())
    assert content["machines"][0]["means"] == {}
    assert content["rows"][0]["peers_absent"] == {"deepgemm": "AbsentError: not here"}


def test_what_cannot_be_told_apart_is_not_measured(fake_gpu, tmp_path, monkeypatch, capsys):
    file = tmp_path / "machines.json"
    fake_gpu.hash = None
    assert measure(file) == 1
    assert "needs NVML to tell GPUs apart" in capsys.readouterr().out
    monkeypatch.setattr(spread, "source_commit", lambda: {"commit": "abc", "dirty": True})
    assert measure(file) == 1
    assert "needs the sources of one commit" in capsys.readouterr().out
    fake_gpu.hash = "a1"
    assert measure(file, "--allow-dirty") == 0


def test_every_family_runs_dry(tmp_path):
    file = tmp_path / "machines.json"
    assert benchmarks.main(["spread", "--dry-run", "--out", str(file)]) == 0
    content = json.loads(file.read_text())
    names = [name.replace("-", "_") for name in spread.FAMILIES]
    assert [row["family"] for row in content["rows"]] == names
    assert all("deepgemm" in {**row["peers"], **row["peers_absent"]} for row in content["rows"])


def test_rows_are_those_that_are_compiled_beforehand():
    is_compiled = [warm_deepgemm.has_deepgemm(case) for case in cases_of("wgrad", [Shape(8, 8, 8)])]
    assert is_compiled == [True, False]  # DeepGEMM always adds
    assert len(spread._cases("dense", is_dry=False)) == 42
    assert [case.labels["accumulate"] for case in spread._cases("wgrad", is_dry=False)] == [
        True
    ] * 4


def test_a_gpu_is_named_by_a_hash_of_its_uuid(monkeypatch):
    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda text: text,
        nvmlDeviceGetUUID=lambda device: "GPU-1234",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_first_uuid", lambda: "GPU-1234")
    name = nvml.gpu_hash()
    assert name and len(name) == 8 and "1234" not in name
    fake.nvmlDeviceGetUUID = lambda device: b"GPU-1234"
    assert nvml.gpu_hash() == name
    fake.nvmlDeviceGetUUID = lambda device: "GPU-1235"
    assert nvml.gpu_hash() not in (None, name)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert nvml.gpu_hash() is None


@pytest.mark.parametrize("failed", ["", "cuInit", "cuDeviceGet", "cuDeviceGetUuid"])
def test_the_gpu_is_the_first_that_cuda_shows(monkeypatch, failed):
    def get_uuid(content, device):
        content[:] = range(16)
        return 0

    calls = dict(cuInit=lambda flags: 0, cuDeviceGet=lambda device, i: i, cuDeviceGetUuid=get_uuid)
    if failed:
        calls[failed] = lambda *_: 100
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: types.SimpleNamespace(**calls))
    if failed:
        with pytest.raises(OSError, match="must have a GPU; got error 100"):
            nvml._first_uuid.__wrapped__()
    else:
        # As `nvidia-smi -L` writes it.
        assert nvml._first_uuid.__wrapped__() == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


# DeepGEMM's time over ours, by machine; None where it did not run.
RATIOS = {"a1": [0.98, 1.02, 1.10], "b2": [1.01, 1.03, None], "c3": [0.97, 1.05, 1.2]}


def write_machines(folder, ratios) -> None:
    head = dict(date="2026-11-25", commit="abc", dirty=False, copy_gbps=4200, rounds=3)
    head |= dict(versions=dict(driver="580.1", jax="0.11.2"))
    rows = [
        dict(machine=name, family="dense", m=i, us=100.0)
        | dict(peers={} if value is None else dict(deepgemm=100 * value))
        for name, values in ratios.items()
        for i, value in enumerate(values)
    ]
    content = dict(machines=[dict(machine=name) | head for name in ratios], rows=rows)
    (folder / "machines.json").write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_page_says_how_far_machines_are_apart(folder):
    write_machines(folder, RATIOS)
    lines = machines.machines_section().splitlines()
    assert lines[0] == "## Several machines" and lines[2].startswith("3 GPUs of one kind ran")
    # The third row did not run on all. Means of the others: 0.9998, 1.0200, 1.0092.
    assert "| dense | 3 | 2 | 1.000 | 1.009 | 1.020 | 1 rows |" in lines
    assert lines[-1] == "| `c3` | 2026-11-25 | abc | 4200 | 3 | 580.1 | 0.11.2 |  |  |"


def test_one_machine_has_no_spread(folder):
    assert machines.machines_section() == "" and machines.spread_text("dense") == ""
    write_machines(folder, {"a1": [0.98]})
    assert machines.machines_section() == "" and machines.spread_text("dense") == ""


def test_readme_has_the_spread_beside_the_mean(folder):
    row = dict(family="dense", m=64, us=10.0, all_us=10.0, peers=dict(deepgemm=10.5))
    (folder / "dense.json").write_text(json.dumps(dict(rows=[row])))
    assert readme.means_text() == "- dense: 1.05x"
    write_machines(folder, RATIOS)
    assert readme.means_text() == "- dense: 1.05x (1.00x to 1.02x on 3 GPUs)"
    assert machines.spread_text("ragged") == ""
