from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticstate import error_file
from elasticstate.agent.post_mortem import cause_of_death, count_oom_kills
from elasticstate.agent.worker_process import Ending


def test_the_error_file_comes_before_the_end_of_stderr(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    error_file.write(path, error_file.describe(ValueError("mine"), 7))
    assert cause_of_death(Ending(1, None, "noise"), path, 0, 0) == ("ValueError: mine\n", 7)
    text, time_ns = cause_of_death(Ending(1, None, "noise"), str(tmp_path / "none"), 0, 0)
    assert (text, time_ns > 7) == ("noise", True)


def test_who_ends_well_has_no_cause(tmp_path: Path) -> None:
    path = str(tmp_path / "error")
    error_file.write(path, error_file.describe(ValueError("caught after all"), 7))
    assert cause_of_death(Ending(0, None, "noise"), path, 0, 0)[0] == ""


@pytest.mark.parametrize(
    ("number", "counted", "said"),
    [
        (signal.SIGKILL, 3, "stderr\nout of memory: its memory cgroup has counted 2 OOM kill(s) meanwhile"),
        (signal.SIGKILL, 1, "stderr"),
        (signal.SIGSEGV, 3, "stderr"),
    ],
)
def test_a_sigkill_may_have_been_the_oom_killer(tmp_path: Path, number: int, counted: int, said: str) -> None:
    assert cause_of_death(Ending(None, number, "stderr"), str(tmp_path / "none"), counted, 1)[0] == said


def test_oom_kills_are_counted_in_both_versions_of_cgroups(tmp_path: Path) -> None:
    mine, old, new = tmp_path / "cgroup", tmp_path / "memory" / "a" / "b", tmp_path / "c"
    old.mkdir(parents=True)
    new.mkdir()
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    (new / "memory.events").write_text("low 0\noom 7\noom_kill 5\noom_group_kill 0\n")
    mine.write_text("4:cpu,memory:/a/b\n1:cpu:/x\n0::/c\n")
    assert count_oom_kills(mine, tmp_path) == 4
    mine.write_text("0::/c\n")
    assert count_oom_kills(mine, tmp_path) == 5
    mine.write_text("0::/nowhere\n")
    assert count_oom_kills(mine, tmp_path) == 0
