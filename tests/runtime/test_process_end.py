"""Threads that compile while their process ends, or forks."""

import pytest
from ext_program import needs_nvrtc, run

pytest.importorskip("jax_fp8gemm._ext")

pytestmark = needs_nvrtc

_COMPILE = """
import os, sys, threading, time

ANOTHER = dict(QUANTIZE_CONFIG, input=1)

def compile_all():
    for mode in range(6):
        ext.compile_quantize(dict(QUANTIZE_CONFIG, mode=mode))
"""


# A compilation takes 0.2 s or more: the process ends before, in and between some.
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.5, 0.8])
def test_a_process_ends_while_a_daemon_thread_compiles(seconds):
    code = f"""
for _ in range(2):
    threading.Thread(target=compile_all, daemon=True).start()
time.sleep({seconds})
sys.exit(3)
"""
    status, _, error = run(_COMPILE + code)
    assert status == 3, error


_FINISH_SLOWLY = """
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)

sys.slow = Slow()  # goes when no thread but this one may run Python
"""


def test_a_process_ends_slowly_while_a_daemon_thread_compiles():
    code = """
threading.Thread(target=compile_all, daemon=True).start()
time.sleep(0.1)
sys.exit(3)
"""
    status, _, error = run(_COMPILE + _FINISH_SLOWLY + code)
    assert status == 3, error


def test_a_daemon_thread_comes_back_when_the_interpreter_is_gone():
    code = """
def find_in_memory():
    while True:
        ext.compile_quantize(ANOTHER)

ext.compile_quantize(ANOTHER)
for _ in range(4):
    threading.Thread(target=find_in_memory, daemon=True).start()
time.sleep(0.2)
sys.exit(3)
"""
    status, _, error = run(_COMPILE + _FINISH_SLOWLY + code)
    assert status == 3, error


def test_a_child_compiles_what_another_thread_of_its_parent_compiled_at_the_fork():
    code = """
threads = [threading.Thread(target=compile_all) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(4):
    time.sleep(0.15)
    child = os.fork()
    if child == 0:
        report = ext.compile_quantize(ANOTHER)
        os._exit(0 if report["cubin_bytes"] > 0 else 1)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()
print(len(children))
"""
    status, output, error = run(_COMPILE + code)
    assert status == 0, error
    assert int(output) == 4


def test_a_child_keeps_the_options_and_no_kernel_of_its_parent(tmp_path):
    code = """
config = QUANTIZE_CONFIG
assert not ext.compile_quantize(config)["from_disk"]
child = os.fork()
if child == 0:
    os._exit(10 + ext.compile_quantize(config)["from_disk"])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
"""
    status, _, error = run(_COMPILE + code, tmp_path)
    assert status == 0, error
