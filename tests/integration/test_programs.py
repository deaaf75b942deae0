"""Jobs with states that change in all ways, under random kills: no commit is lost, and ranks never differ.

Faults are drawn from the seed. After each regroup the test compares all ranks bit by bit: values, learning rates,
buffers, optimizer state.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from random import Random

from tests.kit.job import SCRIPTS, Hosts, Job, Line

HOSTS = ("localhost:2", "127.0.0.2:1")
SIZE = 3
OPTIONS = ("-np", "3", "--join-window", "30", "--min-interrupt-distance", "0.2", "--cooldown-range", "1", "1")


class Program:
    """One job, and the faults that strike it."""

    def __init__(self, directory: Path, seed: int, *script: str, min_np: int) -> None:
        self._random = Random(seed)
        self._hosts = Hosts(directory).set(*HOSTS)
        command = [sys.executable, str(SCRIPTS / "programs.py"), "--log", str(directory / "logs"), "--seed", str(seed)]
        command += ["--stop", str(directory / "stop"), *script]
        self.job = Job(directory, *OPTIONS, "--min-np", str(min_np), *self._hosts.options, command=command)
        self._killed: set[int] = set()

    def run(self, faults: list[str]) -> None:
        with self.job:
            for fault in faults:
                members = self._wait_for_training()
                getattr(self, f"_{fault}")(members)
            self._wait_for_training()
            self.job.stop_file.touch()
            self.job.finish(timeout=120)
        exits = {e["pid"]: (e["exit_code"], e["signal"]) for e in self.job.events("worker_exited")}
        failed = {pid: how for pid, how in exits.items() if how != (0, None)}
        assert failed == dict.fromkeys(self._killed, (None, signal.SIGKILL)), self.job.output[-6000:]
        check_ranks_are_equal(self.job.log())
        check_nothing_is_lost(self.job.log())

    def _wait_for_training(self) -> list[Line]:
        """Wait until a world of full size has made some random number of steps. Return its members."""
        steps = self._random.randrange(3, 25)

        def training() -> list[Line]:
            entered = self.job.log("enter")
            newest = max((line["generation"] for line in entered), default=0)
            members = [line for line in entered if line["generation"] == newest and line["pid"] not in self._killed]
            done = [line for line in self.job.log("backward") if line["generation"] == newest]
            is_full = members and len(members) == members[0]["size"] == SIZE
            return members if is_full and len({line["step"] for line in done}) >= steps else []

        found: list[Line] = self.job.wait_for(f"world of {SIZE} that has trained {steps} steps", training, 90)
        return found

    def _kill(self, *victims: Line) -> None:
        for line in victims:
            os.kill(line["pid"], signal.SIGKILL)
        self._killed.update(line["pid"] for line in victims)
        newest = victims[0]["generation"]
        self.job.wait_for_event("worker_exited", pid=victims[0]["pid"], signal=9)
        self.job.wait_for("next world", lambda: self.job.events("world_formed")[-1]["generation"] > newest)

    def _kill_one(self, members: list[Line]) -> None:
        self._kill(self._random.choice(members))

    def _kill_rank_0(self, members: list[Line]) -> None:
        self._kill(next(line for line in members if line["rank"] == 0))

    def _kill_two(self, members: list[Line]) -> None:
        self._kill(*self._random.sample(members, 2))

    def _kill_all(self, members: list[Line]) -> None:
        """Kill all workers after a small commit. Each second commit is larger; buffers get the size of the largest."""
        generation = members[0]["generation"]

        def is_small() -> bool:
            lines = [line for line in self.job.log() if line["generation"] == generation]
            newest = max((line["step"] for line in lines if line["what"] == "commit"), default=1)
            reached = max((line["step"] for line in lines if line["what"] == "backward"), default=0)
            return newest % 2 == 0 and reached == newest

        self.job.wait_for("small commit of all", is_small)
        self._kill(*members)

    def _take_a_host(self, members: list[Line]) -> None:
        """Remove a host, and add it again."""
        formed = len(self.job.events("world_formed"))
        self._hosts.set(HOSTS[0])
        self.job.wait_for("smaller world", lambda: len(self.job.events("world_formed")) > formed)
        self._hosts.set(*HOSTS)

    def _kill_the_last_that_trains(self, members: list[Line]) -> None:
        """Kill rank 0 of an uneven epoch, when all other ranks are out of inputs."""
        generation = members[0]["generation"]

        def is_alone() -> bool:
            lines = [line for line in self.job.log() if line["generation"] == generation]
            lasts = {line["rank"]: line for line in lines if line["what"] in ("out", "backward")}
            is_alone = {rank: line["what"] for rank, line in lasts.items()} == {0: "backward", 1: "out", 2: "out"}
            return is_alone and lasts[0]["step"] > max(lasts[1]["step"], lasts[2]["step"]) + 3

        self.job.wait_for("some steps of rank 0 alone", is_alone)
        self._kill_rank_0(members)


def check_ranks_are_equal(lines: list[Line]) -> None:
    for what in ("enter", "final"):
        found: dict[int, set[str]] = {}
        for line in lines:
            if line["what"] == what:
                found.setdefault(line["generation"], set()).add(line["digest"])
        unequal = [generation for generation, digests in found.items() if len(digests) > 1]
        assert found, f"no {what} line"
        assert not unequal, f"ranks have different states ({what}) in generations {unequal}"


def check_nothing_is_lost(lines: list[Line]) -> None:
    """Check that a commit sealed by all members that train is never trained again.

    A commit is sealed by all of them if one of them, or the only one still training, has made a later step.
    """
    highest = 0
    for generation in sorted({line["generation"] for line in lines}):
        here = [line for line in lines if line["generation"] == generation]
        began = [line for line in here if line["what"] == "enter"]
        again = [line for line in began if line["step"] < highest]
        assert not again, f"step {highest} was committed before generation {generation}, and lost: {again}"
        out = {line["rank"] for line in here if line["what"] == "out"}
        reached = max((line["step"] for line in here if line["what"] == "backward"), default=0)
        for line in here:
            is_alone = line["what"] == "commit" and {*range(line.get("size", SIZE))} - {line["rank"]} <= out
            if line["what"] == "commit" and (line["step"] <= reached or is_alone):
                highest = max(highest, line["step"])
    assert highest, "no commit was made"


def test_a_state_that_changes_survives_random_kills(tmp_path: Path) -> None:
    Program(tmp_path, 1, "--commit-every", "3", min_np=2).run(
        ["kill_all", "kill_one", "take_a_host", "kill_rank_0", "kill_two"]
    )


def test_an_uneven_state_that_changes_survives_random_kills(tmp_path: Path) -> None:
    """The newest commit is used, even if all that hold it are dead and the survivors were out of inputs."""
    Program(tmp_path, 3, "--uneven", min_np=1).run(["kill_one", "kill_the_last_that_trains", "kill_all"])
