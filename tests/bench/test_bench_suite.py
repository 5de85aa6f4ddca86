"""The suite of benchmarks: its steps, what it remembers, and that every kind of step runs."""

import json
import types

import pytest

import benchmarks
from benchmarks import options, own_process, suite, warm_deepgemm
from benchmarks.case import Case
from benchmarks.options import LAYERS_OF_KERNELS, MESH
from benchmarks.problem import Shape, Work
from benchmarks.suite_steps import PIECES, Step, smoke_piece

pytestmark = pytest.mark.filterwarnings("ignore:jax_fp8gemm. the CUDA kernels are off")


@pytest.mark.parametrize("piece", PIECES)
def test_steps_are_command_lines_that_fit(piece):
    steps = PIECES[piece]
    assert sum(step.seconds for step in steps) <= 540
    assert len({step.name for steps in PIECES.values() for step in steps}) == sum(
        map(len, PIECES.values())
    )
    for step in steps:
        if step.arguments[0] == "warm-deepgemm":
            for table in step.arguments[1:]:
                family, shapes = warm_deepgemm._table(table)
                assert shapes, table
            continue
        arguments = options.make_parser().parse_args(step.command("folder"))
        assert arguments.save == "folder"
        options.check(arguments)
        has_own_shapes = arguments.family in (*LAYERS_OF_KERNELS, "host", *MESH)
        assert has_own_shapes or options.shapes_of(arguments)


def test_results_of_a_suite_have_names_of_their_own():
    commands = [step.command("f") for steps in PIECES.values() for step in steps if step.is_saved]
    parse = options.make_parser().parse_args
    tables = [options.table_name(parse(command), num_gpus=2) for command in commands]
    assert len(set(tables)) == len(tables)
    assert "fsdp_x2" in tables and "dense" in tables


# The regret compiles a program for every tile config: test_every_case_runs_with_every_tile does so.
STEPS = [step for step in smoke_piece(is_dry=True) if step.name != "smoke-regret"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_kind_of_step_runs(step, tmp_path):
    assert benchmarks.main(step.command(str(tmp_path))) == 0
    (file,) = tmp_path.glob("*/*.json")
    content = json.loads(file.read_text())
    assert content["rows"] and content["dry_run"] and not content["failed_rows"]


def test_a_missing_peer_ends_the_suite_before_it_takes_time(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(suite, "supervise", lambda *_: started.append(1) or 0)
    monkeypatch.setattr(suite, "PEER_MODULES", ("json", "no_such_peer"))
    options = ["--state", str(tmp_path)]
    step = PIECES["1"][0]
    suite.State(tmp_path).set(step, "done", 3.0)
    assert suite.main(["--piece", "1", "--again", *options]) == 1
    assert "missing: no_such_peer" in capsys.readouterr().out and not started
    assert suite.State(tmp_path).get(step) == ("done", 3.0)
    assert suite.main(["--piece", "1", "--without-peers", *options]) == 0
    assert suite.main(["--piece", "dry", *options]) == 0 and len(started) == 2


@pytest.mark.parametrize("is_safe", [True, False])
def test_processes_of_the_program_leave_out_the_directory_that_it_leaves_out(is_safe, monkeypatch):
    monkeypatch.setattr(own_process.sys, "flags", types.SimpleNamespace(safe_path=is_safe))
    command = own_process.command("suite", "--piece", "1")
    assert command[1:] == [*["-P"] * is_safe, "-m", "benchmarks", "suite", "--piece", "1"]


def test_steps_that_are_done_are_not_run_again(tmp_path, monkeypatch, capsys):
    from benchmarks import commands

    ran = []

    def bench(arguments):
        ran.append(arguments[0])
        if arguments[0] == "b":
            raise RuntimeError("no memory")
        return 0

    monkeypatch.setattr(commands, "main", bench)
    steps = [Step(name, 1, [name]) for name in "abc"]
    state = suite.State(tmp_path)
    state.set(steps[0], "done", 3.0)
    suite.run_steps(steps, state, "out")
    assert ran == ["b", "c"]
    assert [state.get(step)[0] for step in steps] == ["done", "failed", "done"]
    assert "RuntimeError: no memory" in state.log(steps[1]).read_text()
    assert suite.report(steps, state) == 1
    assert "failed" in capsys.readouterr().out
    state.forget(steps[1:2])
    monkeypatch.setenv("BENCH_SUITE_END", "0")
    suite.run_steps(steps, state, "out")
    assert ran == ["b", "c"] and state.get(steps[1])[0] == ""


def test_deepgemm_is_compiled_by_shares(monkeypatch):
    rows = []

    class Queue:
        launch = staticmethod(lambda run: rows.append(run()))
        wait = staticmethod(lambda: None)

    class Call:
        def __init__(self, i):
            self.queue, self.run = Queue, lambda: i

    def case(i):
        of_deepgemm = {"deepgemm": lambda: Call(i)}
        labels = {"accumulate": i != 3}
        return Case(labels, Shape(1, 1, 1), Work(1, 1), "", lambda: None, of_deepgemm)

    monkeypatch.setattr(warm_deepgemm, "cases_of", lambda *table: [case(i) for i in range(6)])
    assert [warm_deepgemm.compile_share(["dense"], i, 2) for i in range(2)] == [0, 0]
    assert sorted(rows) == [0, 1, 2, 4, 5]
