"""Faults at the commits, seals and reshards of a sharded job, through real workers, agents and a driver.

They strike one after the other at one job (series.py) of three hosts of this machine. The full tensors with which each
world begins are those of the line, bit for bit.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.job import Job, Line
from tests.kit.series import Errors, Recovery, Series, faults_file, one_after_the_other

SCRIPT = Path(__file__).parents[1] / "multihost" / "scripts" / "sharded_faults.py"
OPTIONS = (
    *("-np", "3", "--min-np", "2", "--max-np", "3", "-H", "localhost:1,127.0.0.2:1,127.0.0.3:1", "--replicas", "1"),
    *("--join-window", "30", "--min-interrupt-distance", "0.2", "--reset-limit", "1000"),
    *("--cooldown-range", "0.2", "0.4"),
)


def begun(job: Job, generation: int) -> list[Line]:
    """Return what the members of a world have logged when it began."""
    return [line for line in job.log("enter") if line["generation"] == generation]


def check_shards(job: Job) -> None:
    """Check that all ranks of each world begin with the full tensors of one step of an earlier world."""
    generations = {line["generation"] for line in job.log("enter")}
    assert len(generations) > 1
    for generation in generations:
        lines = begun(job, generation)
        assert len({(line["step"], line["digest"]) for line in lines}) == 1, lines
        step = lines[0]["step"]
        known = {e["digest"] for e in job.log("step") if e["step"] == step and e["generation"] < generation}
        assert not step or lines[0]["digest"] in known, f"world {generation} does not begin with the state of {step}"


def committed(job: Job, generation: int) -> int:
    """Return the last step that all members of a world have committed."""
    steps = [line["step"] for line in job.log("commit") if line["generation"] == generation]
    size = len(begun(job, generation))
    return max(step for step in steps if steps.count(step) >= size)


def struck(job: Job, point: str) -> tuple[int, int]:
    """Return generation and tick of the commit at which a fault struck."""
    (path,) = job.logs.glob(f"struck-{point}-*")
    generation, tick = re.findall(r"\d+", path.name)
    return int(generation), int(tick)


def next_worlds(job: Job, recovery: Recovery) -> list[Line]:
    """Return, for each world after a fault, what its rank 0 logged when it began."""
    return [line for line in job.log("enter") if line["generation"] > recovery.generation and line["rank"] == 0]


def killed(series: Series, *faults: str, deaths: int = 1) -> Recovery:
    recovery = series.strike(*faults, deaths=deaths)
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}
    return recovery


def a_worker_dies_while_it_writes_the_bytes_of_a_commit(series: Series) -> None:
    recovery = killed(series, "kill@commit-bytes:rank=1:generation={now}")
    (exited,) = recovery.exits
    last = committed(series.job, recovery.generation)
    assert next_worlds(series.job, recovery)[0]["step"] == last, "the newest commit of all members"
    assert exited["rank"] == 1


def a_worker_dies_between_the_seals_of_two_ranks(series: Series) -> None:
    recovery = killed(series, "kill@seal:rank=2:generation={now}")
    generation, tick = struck(series.job, "seal")
    assert generation == recovery.generation
    assert (series.job.logs / f"sealed-0-{generation}-{tick}").exists(), "rank 0 has sealed the commit"
    last = committed(series.job, generation)
    assert next_worlds(series.job, recovery)[0]["step"] == last, "the commit that rank 2 has not sealed is no line"


def a_worker_dies_while_it_reads_shards(series: Series) -> None:
    recovery = killed(
        series, "kill@commit-bytes:rank=0:generation={now}", "kill@reshard:rank=1:generation={next}", deaths=2
    )
    assert len(recovery.worlds) >= 2, "the world after the first death has failed"
    assert next_worlds(series.job, recovery)[0]["step"] == committed(series.job, recovery.generation)


def the_only_newest_shards_are_damaged_when_their_worker_dies(series: Series) -> None:
    recovery = killed(series, "kill@damage:rank=1:generation={now}")
    generation, tick = struck(series.job, "damage")
    assert generation == recovery.generation
    job = series.job
    text = f"commit ({generation}, {tick}) in the memory of slot"
    told = [event["text"] for event in job.events("warning") if text in event["text"]]
    assert len(told) == 1, job.events("warning")
    assert "is damaged" in told[0]
    entered = next_worlds(job, recovery)[0]
    (first,) = {line["step"] for line in begun(job, generation)}
    assert entered["step"] == first + tick - 1, "the commit before the damaged one"
    assert len(recovery.worlds) <= 4, "one world has tried to read the damaged copy, and no other"


STRIKES: dict[str, Callable[[Series], object]] = {
    "a worker dies while it writes the bytes of a commit": a_worker_dies_while_it_writes_the_bytes_of_a_commit,
    "a worker dies between the seals of two ranks": a_worker_dies_between_the_seals_of_two_ranks,
    "a worker dies while it reads shards of others": a_worker_dies_while_it_reads_shards,
    "the only newest shards are damaged": the_only_newest_shards_are_damaged_when_their_worker_dies,
}


@pytest.fixture(scope="module")
def struck_job(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    directory = tmp_path_factory.mktemp("sharded-faults")
    script = ["--log", str(directory / "logs"), "--faults-file", str(faults_file(directory)), "--steps", "10"]
    command = [sys.executable, str(SCRIPT), *script, "--step-seconds", "0.03", "--until", str(directory / "stop")]
    with Job(directory, *OPTIONS, command=command) as job:
        series = Series(job, 3)

        def strike(fault: str) -> None:
            STRIKES[fault](series)
            check_shards(job)
            if fault == [*STRIKES][-1]:
                job.stop_file.touch()
                job.finish(0)
                assert job.fired() == series.fired
                check_shards(job)

        return one_after_the_other(STRIKES, strike)


@pytest.mark.parametrize("fault", STRIKES)
def test_no_committed_step_is_lost_and_the_shards_are_those_of_the_line(struck_job: Errors, fault: str) -> None:
    struck_job.check(fault)
