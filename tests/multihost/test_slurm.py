"""Jobs inside allocations of a real Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import slurm as real
from tests.kit.forks import PACKAGE
from tests.kit.hosts import QUICK, trains_with
from tests.kit.job import Job
from tests.kit.slurm import Slurm, free_ports, wait_for

pytestmark = pytest.mark.skipif(bool(real.missing()), reason=real.missing())

DEPLOY = PACKAGE / "deploy" / "slurm"
RESUMING = Path(__file__).parent / "scripts" / "resuming.py"
INTERVAL = ("--discovery-interval", "0.2")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    with Slurm(tmp_path) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
        monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
        yield cluster


class Batch:
    """A batch job that runs one of the scripts in deploy/slurm. Use it as a context manager."""

    def __init__(self, slurm: Slurm, directory: Path, name: str, *options: str, script: Path | None = None) -> None:
        directory.mkdir()
        self._slurm = slurm
        self._directory = directory
        self._output = directory / "output"
        arguments = [str(script), str(directory)] if script is not None else []
        self.id = slurm.call(
            *("sbatch", "--parsable", f"--output={self._output}", f"--chdir={PACKAGE}", *options),
            *(str(DEPLOY / name), *arguments),
        )

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._slurm.call("scancel", self.id)
            print(f"job {self.id}:\n{self.output}")

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def state(self) -> str:
        return self._slurm.job_state(self.id)

    def start_now(self) -> bool:
        """Start a job that waits. Return True if it runs. The end of the run before may still set another start."""
        if self.state == "PENDING":
            self._slurm.start_now(self.id)
        return self.state == "RUNNING"

    def steps(self) -> list[str]:
        """Return the lines that the script resuming.py has written."""
        path = self._directory / "steps"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, line: str) -> None:
        wait_for(line, lambda: line in self.output)

    def stop(self) -> None:
        """Let the script resuming.py return."""
        (self._directory / "stop").touch()

    def ends_well(self) -> None:
        wait_for(f"end of job {self.id}", lambda: self.state not in ("RUNNING", "COMPLETING"))
        assert self.state == "COMPLETED"


def allocation(*options: str) -> tuple[str, ...]:
    return ("salloc", "--quiet", "--no-kill", *options)


def test_a_job_survives_all_that_slurm_does_to_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """The command names neither hosts nor -np."""
    within = allocation("--nodes=2", "--ntasks-per-node=1")
    with Job(tmp_path, *QUICK, *INTERVAL, within=within, until=tmp_path / "stop", steps=5) as job:
        assert trains_with(job, 2)["hosts"] == 2
        (step,) = slurm.steps("n2")
        slurm.call("scancel", step)
        job.wait_for_event("agent_lost", host="n2")
        trains_with(job, 1)
        trains_with(job, 2, count=2)
        assert slurm.steps("n2") not in ([], [step]), "a new step runs there"

        slurm.call("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
        assert trains_with(job, 1, count=2)["left"] == ["n2:0#2"]
        slurm.call("scontrol", "update", "nodename=n2", "state=resume")
        trains_with(job, 2, count=3)

        (step,) = slurm.steps("n1")
        slurm.signal(step, "TERM")
        job.wait_for_event("host_draining", host="n1")
        trains_with(job, 1, count=3)
        job.stop_file.touch()
        job.finish()
        job.check_survival()
        failures = [event["worker"] for event in job.events("worker_exited") if event["exit_code"] != 0]
        assert failures == ["n2:0#1"], "only the cancelled step has cost a worker"


def test_a_second_allocation_joins(slurm: Slurm, tmp_path: Path) -> None:
    """Agents take their names and slots from Slurm. On this machine both nodes have the same host name."""
    (port,) = free_ports(1)
    variables = f"--export=ALL,ADDRESS=127.0.0.1:{port},TOKEN_FILE={tmp_path / 'token'}"
    with Batch(slurm, tmp_path / "first", "first.sbatch", variables, "--exclusive", script=RESUMING) as first:
        first.wait_for(": 2 workers on 1 host; joined: n1:")  # with slot 0 or 1, whichever started last
        with Batch(slurm, tmp_path / "join", "join.sbatch", variables, "--exclusive", "--cpus-per-task=1") as joining:
            first.wait_for(": 3 workers on 2 hosts; joined: n2:0")
            first.stop()
            joining.ends_well()
        first.ends_well()
    assert f"host n1 added: {real.CPUS} slots" in first.output
    assert "host n2 added: 1 slot" in first.output


def test_a_requeued_job_resumes(slurm: Slurm, tmp_path: Path) -> None:
    with Batch(slurm, tmp_path / "job", "train.sbatch", script=RESUMING) as job:
        wait_for("five steps", lambda: len(job.steps()) > 5)
        slurm.call("scontrol", "requeue", job.id)
        wait_for("a job that waits", lambda: job.state == "PENDING")
        before = len(job.steps())
        wait_for("the second run", job.start_now)
        wait_for("five more steps", lambda: len(job.steps()) > before + 5)
        job.stop()
        job.ends_well()
    first, second = (list(map(int, run.split())) for run in " ".join(job.steps()).split("start ") if run)
    assert second[0] >= first[-1] >= 5, "the checkpoint of the first run"
    assert second == list(range(second[0], second[-1] + 1))
