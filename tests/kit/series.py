"""A series of faults at one job: each strikes when the job has recovered from the one before.

So the faults share the boot of the workers. Each fault is asserted to have happened, and its recovery, before the next.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.kit.job import Job, Line


class Errors(dict[str, str]):
    """The error of each fault that has struck; "" if it was survived."""

    def check(self, fault: str) -> None:
        assert fault in self, f"has not struck, because this one was not survived: {list(self)[-1]}"
        assert not self[fault], self[fault]


def one_after_the_other(faults: Iterable[str], strike: Callable[[str], None]) -> Errors:
    """Let faults strike until one of them is not survived. Return the errors."""
    errors = Errors()
    for fault in faults:
        try:
            strike(fault)
        except Exception:
            errors[fault] = traceback.format_exc()
            break
        errors[fault] = ""
    return errors


def faults_file(directory: Path) -> Path:
    """Return the file from which the workers of ``train.py`` read the faults, while they run."""
    return directory / "faults"


@dataclass(frozen=True)
class Recovery:
    """Events from a fault until all workers train again."""

    generation: int  # the one that the fault ended
    exits: list[Line]
    worlds: list[Line]
    resumed: list[Line]


class Series:
    """Faults at a job of ``size`` workers that runs with ``--faults-file``."""

    def __init__(self, job: Job, size: int) -> None:
        self.job = job
        self.size = size
        self.fired = 0  # faults of the file
        self._seen = 0  # events before the fault

    def wait_until_whole(self) -> int:
        """Wait until all workers are in a world that formed after the last death, and train. Return its generation."""

        def whole() -> int:
            decisive = [event for event in self.job.events() if event["event"] in ("world_formed", "worker_exited")]
            if not decisive or decisive[-1]["event"] != "world_formed" or decisive[-1]["size"] != self.size:
                return 0
            generation = int(decisive[-1]["generation"])
            trained = {line["rank"] for line in self.job.log("commit") if line["generation"] == generation}
            return generation if len(trained) == self.size else 0

        generation: int = self.job.wait_for(f"world of {self.size} that trains", whole)
        return generation

    def strike(self, *faults: str, deaths: int, act: Callable[[], object] | None = None) -> Recovery:
        """Let faults strike, and wait for the recovery.

        ``faults``: as for ``train.py``; ``{now}`` and ``{next}`` are the numbers of this generation and of the next.
        ``act``: what the test itself does to the workers. ``deaths``: workers that must end, and no others.
        """
        generation = self.wait_until_whole()
        self._seen = len(self.job.events())
        self.arm(*faults)
        if act is not None:
            act()
        self.job.wait_for(f"{len(faults)} faults to strike", lambda: self.job.fired() == self.fired)
        self.job.wait_for(f"end of {deaths} workers", lambda: len(self._events("worker_exited")) >= deaths)
        again = self.wait_until_whole()
        self.job.wait_for("report of the recovery", lambda: self._events("training_resumed"))
        recovery = Recovery(generation, *map(self._events, ("worker_exited", "world_formed", "training_resumed")))
        assert again > generation
        assert len(recovery.exits) == deaths, recovery.exits
        return recovery

    def _events(self, name: str) -> list[Line]:
        return [event for event in self.job.events()[self._seen :] if event["event"] == name]

    def arm(self, *faults: str) -> None:
        """Give the workers these faults, too, in the newest world."""
        if not faults:
            return
        now = max(int(event["generation"]) for event in self.job.events("world_formed"))
        path = faults_file(self.job.directory)
        fresh = path.with_suffix(".new")
        fresh.write_text(
            (path.read_text() if path.exists() else "")
            + "".join(f"{fault.format(now=now, next=now + 1)}\n" for fault in faults)
        )
        fresh.replace(path)
        self.fired += len(faults)


# ------------------------------------------------------------------------------------------------- faults of any series


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def one_is_killed(series: Series, rank: int) -> Recovery:
    recovery = series.strike(deaths=1, act=lambda: kill(series.job.pid_of(rank)))
    (exited,) = recovery.exits
    assert (exited["signal"], exited["rank"]) == (signal.SIGKILL, rank)
    assert recovery.resumed[0]["ticks_lost"] <= 1
    return recovery


def a_second_dies(series: Series, fault: str) -> None:
    recovery = series.strike("kill@step:rank=2:generation={now}", fault, deaths=2)
    expected = {signal.SIGKILL, signal.SIGSEGV} if fault.startswith("segv") else {signal.SIGKILL}
    assert {exited["signal"] for exited in recovery.exits} == expected


def three_are_killed(series: Series) -> None:
    def three() -> None:
        for pid in [series.job.pid_of(rank) for rank in (0, 1, 2)]:
            kill(pid)

    recovery = series.strike(deaths=3, act=three)
    assert {exited["signal"] for exited in recovery.exits} == {signal.SIGKILL}
