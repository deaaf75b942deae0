from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate import tracebacks
from elasticstate.agent.workers import Ending, cause_of_death, count_oom_kills


def test_the_error_file_comes_before_the_end_of_stderr(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    tracebacks.write(path, tracebacks.describe(ValueError("mine"), 7))
    assert cause_of_death(Ending(1, None, "noise"), tracebacks.read(path), 0, 0) == ("ValueError: mine\n", 7)
    text, time_ns = cause_of_death(Ending(1, None, "noise"), None, 0, 0)
    assert (text, time_ns) == ("noise", 0)


def test_who_ends_well_has_no_cause(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    tracebacks.write(path, tracebacks.describe(ValueError("caught after all"), 7))
    assert cause_of_death(Ending(0, None, "noise"), tracebacks.read(path), 0, 0)[0] == ""


@pytest.mark.parametrize(
    ("number", "counted", "said"),
    [
        (signal.SIGKILL, 3, "stderr\nout of memory: its memory cgroup counted 2 OOM kill(s) while the worker ran"),
        (signal.SIGKILL, 1, "stderr"),
        (signal.SIGSEGV, 3, "stderr"),
    ],
)
def test_a_sigkill_may_have_been_the_oom_killer(tmp_path: Path, number: int, counted: int, said: str) -> None:
    assert cause_of_death(Ending(None, number, "stderr"), None, counted, 1)[0] == said


def test_oom_kills_are_counted_in_both_versions_of_cgroups(tmp_path: Path) -> None:
    old, new = tmp_path / "memory" / "a" / "b", tmp_path / "c"
    old.mkdir(parents=True)
    new.mkdir()
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    (new / "memory.events").write_text("low 0\noom 7\noom_kill 5\noom_group_kill 0\n")
    texts = {"both": "4:cpu,memory:/a/b\n1:cpu:/x\n0::/c\n", "new": "0::/c\n", "gone": "0::/nowhere\n", "none": ""}
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found[name] = count_oom_kills(tmp_path / name, tmp_path)
    assert found == {"both": 4, "new": 5, "gone": 0, "none": 0}
    (new / "memory.events").write_text("oom_kill 6\n")
    assert count_oom_kills(tmp_path / "new", tmp_path) == 6
    assert count_oom_kills(tmp_path / "no such file", tmp_path) == 0


def test_who_misses_the_variables_of_a_world_is_told_what_to_change(tmp_path: Path) -> None:
    """torch, and scripts written for torchrun, read RANK at their start. It is set only inside a world."""
    calls = [
        "torch.distributed.init_process_group('gloo')",
        "torch.distributed.device_mesh.init_device_mesh('cpu', (2,))",
        "torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2))",
        "os.environ['LOCAL_RANK']",
    ]
    program = (
        "import os, sys, traceback, torch.distributed.device_mesh, torch.distributed.fsdp\n"
        "for call in sys.argv[1:]:\n"
        "    try:\n        eval(call)\n    except Exception:\n        print(traceback.format_exc(), end='\\0')\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    command = [sys.executable, "-c", program, *calls]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=clean, timeout=60, check=True)
    raised = done.stdout.removesuffix("\0").split("\0")
    assert len(raised) == len(calls), "each fails without a world"
    for stack in raised:
        cause, _ = cause_of_death(Ending(1, None, stack), None, 0, 0)
        assert cause.startswith(stack)
        hint = cause.removeprefix(stack)
        assert "inside a function decorated with @elasticstate.run" in hint
        assert "remove init_process_group()" in hint


@pytest.mark.parametrize(
    "call", ["torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))", "torch.distributed.barrier()"]
)
def test_a_process_group_that_is_missing_is_told_with_the_place_for_it(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\n{call}"], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    cause, _ = cause_of_death(Ending(1, None, done.stderr), None, 0, 0)
    assert cause.startswith(done.stderr.rstrip())
    assert "Create DistributedDataParallel there" in cause.removeprefix(done.stderr.rstrip())
    assert "A script without run calls init_process_group()." in cause, "the advice for a plain script"


def test_the_same_in_the_error_file(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    tracebacks.write(path, tracebacks.describe(KeyError("RANK"), 7))
    text, time_ns = cause_of_death(Ending(1, None, "noise"), tracebacks.read(path), 0, 0)
    assert text.startswith("KeyError: 'RANK'\nelasticrun sets RANK")
    assert time_ns == 7


@pytest.mark.parametrize("text", ["KeyError: 'RANKS'", "KeyError: 'WORLD'", "ValueError: RANK is 3"])
def test_other_errors_have_no_such_hint(text: str) -> None:
    assert cause_of_death(Ending(1, None, text), None, 0, 0)[0] == text
