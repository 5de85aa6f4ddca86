"""Training on a mesh that spans processes, each with devices of its own."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import types

import distributed_program
import expert_hosts_program
import jax
import numpy as np
import pytest
import reference
from xla_options import QUICK_FLAGS

_DOCUMENT = pathlib.Path(distributed_program.__file__).parents[1] / "docs" / "multihost.md"
_SECONDS = 100  # until the processes are taken to be stuck


def run_processes(
    program: types.ModuleType, num_devices: int, folder: pathlib.Path
) -> list[dict[str, np.ndarray]]:
    """What each of two processes of the program saved, which has so many devices."""
    num_processes = 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    flags = " ".join([f"--xla_force_host_platform_device_count={num_devices}", *QUICK_FLAGS])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    logs = [folder / f"{i}.log" for i in range(num_processes)]
    paths = [folder / f"{i}.npz" for i in range(num_processes)]
    processes = []
    try:
        for i, (path, log) in enumerate(zip(paths, logs, strict=True)):
            arguments = [coordinator, str(i), str(num_processes), str(path)]
            command = [sys.executable, str(program.__file__), *arguments]
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * num_processes, "\n".join(log.read_text()[-3000:] for log in logs)
    return [dict(np.load(path)) for path in paths]


def test_two_processes_train_as_one(tmp_path):
    expected, _ = distributed_program.train(**distributed_program.inputs())
    for saved in run_processes(distributed_program, 2, tmp_path):
        # Weights are cut by both axes: they cross between the processes as FP8.
        moved = saved.pop("moved").tolist()
        assert any("all-gather f8e4m3fn" in text for text in moved), moved
        assert not any("all-gather f32[256,512]" in text for text in moved), moved
        assert saved.keys() == expected.keys()
        for name, x in expected.items():
            assert np.any(saved[name]), name
            reference.assert_same_bits(saved[name], x)


def test_experts_on_two_processes_as_on_one(tmp_path):
    """Which are hosts of four devices: the same bits, and FP8 goes once to a host."""
    p = expert_hosts_program
    expected, expected_moved = p.run(np.array(jax.devices()[: p.HOSTS * p.DEVICES]))
    for saved in run_processes(p, p.DEVICES, tmp_path):
        moved = saved.pop("moved").tolist()
        assert moved == expected_moved
        # Forward and backward: to each host at most all tokens of a device.
        of_device = p.TOKENS // (p.HOSTS * p.DEVICES)
        to_hosts = [text for text in moved if text.startswith("all-to-all f8e4m3fn")]
        assert to_hosts == [f"all-to-all f8e4m3fn[{of_device},{p.D}]"] * 2
        assert saved.keys() == expected.keys()
        for name, x in expected.items():
            assert np.any(saved[name]), name
            reference.assert_same_bits(saved[name], x)


def ragged_options():
    """The options of ragged_all_to_all that docs/sharding.md lists for this jaxlib, as flags."""
    text = (_DOCUMENT.parent / "sharding.md").read_text()
    rows = re.findall(r"^\| `(xla_\w+)` \| (\w+) \| (\w+) \|", text, flags=re.MULTILINE)
    assert len(rows) == 10
    columns = {(0, 10): 0, (0, 12): 1}
    column = columns.get(jax.__version_info__[:2])
    if column is None:
        return []
    defaults = {name: values[column] for name, *values in rows}
    return [f"--{name}={value}" for name, value in defaults.items() if value != "absent"]


@pytest.mark.skipif(not _DOCUMENT.exists(), reason="needs the checkout that the tests came from")
def test_flags_of_the_document_exist():
    """XLA aborts on a flag that it does not know."""
    flags = re.findall(r"--xla_\w+=\w*", _DOCUMENT.read_text())
    assert len(set(flags)) > 10
    flags += ragged_options()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    unknown = environment | {"XLA_FLAGS": "--xla_gpu_no_such_flag=1"}
    assert subprocess.run(command, capture_output=True, env=unknown, timeout=100).returncode != 0
