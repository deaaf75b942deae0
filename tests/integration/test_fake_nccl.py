"""Jobs on a fake of NCCL (scripts/fake_nccl.py), with real agents and workers, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts import fake_nccl
from tests.kit.forks import SCRIPTS, Template
from tests.kit.job import Hosts, Job
from tests.kit.ranks import Ranks

TORCH_2_15 = {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}


NCCL2 = {**TORCH_2_15, "backend": "nccl2"}
CONTEXT = "elasticstate.worker.contexts.nccl:"


class FakeJob(Job):
    """A job on the fake, of train.py if no other ``script`` is given. ``fake``: settings of the fake."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        *options: str,
        script: str = "train.py",
        fault: str = "",
        steps: int = 40,
        backend: str = "nccl",
        arguments: Sequence[str] = (),
        **fake: Any,
    ) -> None:
        self.notes = directory / "notes"
        self.notes.mkdir()
        monkeypatch.setenv(fake_nccl.VARIABLE, json.dumps({"notes": str(self.notes), **fake}))
        command = [sys.executable, str(SCRIPTS / "fake_nccl.py"), str(SCRIPTS / script), *arguments]
        command += ["--log", str(directory / "logs"), "--steps", str(steps), *(["--fault", fault] if fault else [])]
        super().__init__(directory, "--backend", backend, *options, command=command)

    def noted(self, what: str) -> list[dict[str, Any]]:
        return fake_nccl.notes(self.notes, what)

    def processes(self) -> int:
        """Return how many processes have trained."""
        return len({line["pid"] for line in self.log("enter")})

    def check_order(self) -> None:
        """Check that each group was aborted before it was shut down, on the device of its process."""
        ended = {(line["pid"], line["part"]) for line in self.noted("abort ends")}
        shut_down = self.noted("shutdown")
        assert shut_down
        for line in shut_down:
            assert line["aborted"], line
            assert (line["pid"], line["part"]) in ended
        devices = {line["pid"]: line["device"] for line in self.noted("group")}
        assert len(set(devices.values())) > 1
        for line in self.noted("abort begins"):
            assert line["device"] == devices[line["pid"]], line


@pytest.mark.parametrize(
    ("fake", "raises"),
    [({"names": ["nccl"]}, False), (TORCH_2_15, False), (NCCL2, False), (NCCL2, True)],
    ids=["2.13", "2.15", "nccl2", "nccl2-error"],
)
def test_survivors_of_a_dead_member_keep_their_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: dict[str, Any], raises: bool
) -> None:
    """A collective that is aborted leaves garbage, or raises an error. nccl2 gives it no type of its own."""
    with FakeJob(tmp_path, monkeypatch, "-np", "3", fault="kill@20:rank=1", raises_when_aborted=raises, **fake) as job:
        job.finish(0, timeout=90)
        job.check_survival(faults=1)
        assert job.processes() == 4, job.output
        assert {line["name"] for line in job.noted("group")} == {"nccl2" if "backend" in fake else "nccl"}
        assert {line["timeout"] for line in job.noted("abort begins")} == {15.0}, "nccl2 waits for so long"
        assert {line["seconds"] for line in job.noted("set_timeout")} == {1800.0, 15.0}, "in a world, and for the abort"
        job.check_order()


def test_no_group_is_destroyed_while_its_abort_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "3", fault="kill@20:rank=1", abort_s=1.0) as job:
        job.finish(0, timeout=90)
        job.check_survival(faults=1)
        assert job.processes() == 4, job.output
        job.check_order()


def test_a_process_whose_abort_does_not_end_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {CONTEXT + "_ABORT_TIMEOUT_S": 1.0}
    with FakeJob(
        tmp_path,
        monkeypatch,
        "-np",
        "2",
        "--join-window",
        "60",
        fault="kill@20:rank=1",
        abort_s=300,
        constants=constants,
    ) as job:
        job.wait_for("the end of the survivor", lambda: "has not aborted its communicators within 1 s" in job.output)
        assert job.noted("abort begins")


def test_a_process_that_makes_a_group_with_a_member_that_dies_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for that member for ever. The job goes on from the commits of both."""
    start: dict[str, Any] = {"what": "start", "slot": 2, "at": 2}
    constants = {CONTEXT + "_ABORT_TIMEOUT_S": 1.0}
    with FakeJob(
        tmp_path, monkeypatch, "-np", "3", fault="kill@20:rank=1", faults=[start], constants=constants, steps=60
    ) as job:
        job.finish(0, timeout=180)
        (dead,) = job.noted("die")
        begun = Counter(line["pid"] for line in job.noted("start begins"))
        begun.subtract(line["pid"] for line in job.noted("group"))
        assert [pid for pid in begun if begun[pid] and pid != dead["pid"]], "others have waited for it"
        assert "NCCL has waited 1 s for a lost member while it made a group" in job.output
        assert all(line["step"] >= 19 for line in job.log("enter") if line["generation"] > 1), "nothing is lost"
        assert len({line["digest"] for line in job.log("final")}) == 1


def test_a_group_that_a_rank_never_makes_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is lost, and torch's watchdog sees no operation. NCCL's start ends with its process only."""
    late: dict[str, Any] = {"what": "late", "slot": 1, "at": 1}
    constants = {CONTEXT + "_ABORT_TIMEOUT_S": 1.0}
    options = ("-np", "2", "--collective-timeout", "3")
    with FakeJob(tmp_path, monkeypatch, *options, faults=[late], constants=constants, steps=20) as job:
        job.finish(0, timeout=120)
        assert job.noted("late")
        assert "generation 1 ends: NCCL has not made a group within --collective-timeout of 3 s" in job.output
        assert "NCCL has waited 1 s for a lost member while it made a group" in job.output
        assert len({line["digest"] for line in job.log("final")}) == 1


def test_a_backend_that_cannot_be_aborted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "2", names=["nccl"], nccl_is="torchcomms") as job:
        job.finish(3, timeout=60)
        assert (
            "torch has made no part of NCCL for CUDA tensors, but 'torchcomms'" in job.events("root_cause")[0]["error"]
        )


def test_groups_that_are_not_destroyed_in_time_end_with_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = {CONTEXT + "_DESTROY_TIMEOUT_S": 1.0}
    with FakeJob(
        tmp_path,
        monkeypatch,
        "-np",
        "2",
        "--join-window",
        "60",
        fault="kill@20:rank=1",
        shutdown_s=300,
        constants=constants,
    ) as job:
        job.wait_for("the end of the survivor", lambda: "torch has not destroyed its groups within 1 s" in job.output)
        assert job.noted("shutdown")


def test_groups_of_the_script_end_with_their_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member dies while its partner waits in a receive of their group, which is split from the default group."""
    with FakeJob(
        tmp_path, monkeypatch, "-np", "4", script="groups_job.py", arguments=["--die", "1", "20"], splits=True
    ) as job:
        job.finish(0, timeout=90)
        job.check_survival()
        assert job.processes() == 5, job.output
        job.check_order()
        assert len(job.log("dies")) == 1
        made = {(line["pid"], line["part"]) for line in job.noted("group")}
        aborted = {(line["pid"], line["part"]) for line in job.noted("abort ends")}
        (dead,) = {line["pid"] for line in job.log("dies")}
        assert {part for part in made if part[0] != dead} == aborted, "each group of each process and world"
        sizes = Counter((line["pid"], line["size"]) for line in job.noted("group"))
        for pid in {line["pid"] for line in job.log("enter") if line["generation"] == 1} - {dead}:
            assert (sizes[pid, 4], sizes[pid, 2]) == (2, 10), "of two worlds; five of pairs in each"


def test_a_member_that_dies_in_a_split_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes part in the split for a group of which it is no member."""
    fault = [{"what": "split", "slot": 0, "at": 2}]
    constants = {CONTEXT + "_ABORT_TIMEOUT_S": 1.0}
    with FakeJob(
        tmp_path, monkeypatch, "-np", "3", script="groups_job.py", faults=fault, constants=constants, splits=True
    ) as job:
        job.finish(0, timeout=120)
        assert job.noted("die")
        assert "NCCL has waited 1 s for a lost member while it made a group" in job.output
        assert len({line["digest"] for line in job.log("final")}) == 1


def test_an_abort_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of a survivor does not answer, so the worker is replaced."""
    with FakeJob(tmp_path, monkeypatch, "-np", "2", fault="kill@20:rank=1", abort_raises="unhandled cuda error") as job:
        job.wait_for(
            "the reason", lambda: "NCCL could not abort a communicator: unhandled cuda error" in job.output, timeout=60
        )


def test_a_group_that_refuses_to_shut_down_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "a captured CUDA graph is alive"
    with FakeJob(tmp_path, monkeypatch, "-np", "3", fault="kill@20:rank=1", shutdown_raises=refusal, **NCCL2) as job:
        job.finish(0, timeout=90)
        job.check_survival(faults=1)
        assert job.processes() == 4, job.output
        assert f"torch could not shut down a process group, and forgets it: {refusal}" in job.output


@pytest.mark.parametrize("change", ["death", "newcomer"])
def test_graphs_that_a_script_has_left_do_not_hold_an_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    hosts = Hosts(tmp_path).set("localhost:3")
    options = (*hosts.options, "-np", "3", "--join-window", "0")
    with FakeJob(tmp_path, monkeypatch, *options, script="graph_job.py", steps=200) as job:
        job.wait_for_step(20)
        if change == "death":
            job.kill(1)
        else:
            hosts.set("localhost:4")
        job.finish(0, timeout=90)
        job.check_survival()
        assert job.processes() == 4, job.output
        assert "caught the exception" not in job.output, "no collective has raised one"
        job.check_order()


def test_a_graph_that_a_script_keeps_does_not_fail_the_job_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = {CONTEXT + "_ABORT_TIMEOUT_S": 1.0}
    with FakeJob(
        tmp_path, monkeypatch, "-np", "2", script="graph_job.py", arguments=["--keep"], constants=constants
    ) as job:
        job.finish(0, timeout=90)
        job.check_survival()
        assert "within 1 s. Drop the CUDA graphs with collectives before the training function returns." in job.output


def test_collectives_that_hang_while_all_processes_live_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = [{"what": "stall", "slot": 1, "at": 40}]
    with FakeJob(tmp_path, monkeypatch, "-np", "3", "--collective-timeout", "3", faults=stall) as job:
        job.finish(0, timeout=90)
        job.check_survival()
        assert [end["cause"].partition(" ")[2] for end in job.events("end")] == ["reported a broken generation"]
        assert "generation 1 ends: an operation of NCCL has taken longer than --collective-timeout of 3 s" in job.output
        assert job.processes() == 3, job.output


def test_an_error_that_only_nccl_sees_ends_the_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = [{"what": "error", "slot": 1, "at": 40}]
    with FakeJob(tmp_path, monkeypatch, "-np", "3", faults=error, steps=80) as job:
        job.finish(0, timeout=90)
        job.check_survival()
        (end,) = job.events("end")
        assert end["cause"] == "localhost:1#1 reported a broken generation"
        assert "1] elasticstate: generation 1 ends: NCCL has lost the connection to another worker" in job.output
        assert end["time"] - job.noted("error")[0]["time"] < 3
        assert job.processes() == 3, job.output


def test_a_torch_without_errors_of_parts_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "2", has_errors=False, steps=10) as job:
        job.finish(0, timeout=60)
        job.check_survival()


def test_a_planned_change_aborts_nothing_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages on their way to a slow member still arrive there."""
    hosts = Hosts(tmp_path).set("localhost:2")
    options = (*hosts.options, "-np", "2", "--join-window", "0")
    with FakeJob(tmp_path, monkeypatch, *options, steps=25, slow_slot=1) as job:
        job.wait_for_step(3)
        hosts.set("localhost:3")
        job.finish(0, timeout=90)
        job.check_survival()
        assert job.processes() == 3
        assert {line["generation"] for line in job.log("enter")} == {1, 2}
        assert job.events("job_finished")[0]["failures"] == 0
        job.check_order()


def test_a_version_of_nccl_that_does_not_survive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "2", version=[2, 28, 3]) as job:
        job.finish(3, timeout=60)
        assert "UsageError: --backend: 'nccl': NCCL 2.28.3: " in job.events("root_cause")[0]["error"]
        assert "set ELASTICSTATE_ANY_NCCL=1" in job.output


def test_whoever_wants_that_version_may_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICSTATE_ANY_NCCL", "1")
    with FakeJob(tmp_path, monkeypatch, "-np", "2", version=[2, 28, 3], steps=10) as job:
        job.finish(0, timeout=60)
        assert "ELASTICSTATE_ANY_NCCL=1 permits it" in job.output


def test_nccl2_that_torch_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(tmp_path, monkeypatch, "-np", "1", names=["nccl"], backend="nccl2") as job:
        job.finish(3, timeout=60)
        assert "has no backend nccl2. Use --backend nccl" in job.output


def test_a_worker_that_leaves_alone_waits_for_nobody(template: Template, tmp_path: Path) -> None:
    ranks = Ranks(template, "context_rank.py", "nccl", "STORE", str(tmp_path), "{}")
    try:
        members = ranks.boot(2)
        ranks.create("first", members)
        begun = time.monotonic()
        assert members[0].do("leave")["error"] is None
        assert time.monotonic() - begun < 2.5, "the limit of the barrier is 5 s"
    finally:
        ranks.end()
