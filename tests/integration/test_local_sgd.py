"""LocalSGD and DiLoCo in real jobs, through kills, joins and a leave.

The script logs its values at the begin of each world and at each commit. The test repeats what every member of a world
has trained, in plain torch, and makes the outer steps with formulas of its own.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.scripts import inner_steps
from tests.kit.forks import SCRIPTS
from tests.kit.job import Hosts, Job, Line

EVERY = 6
FAST = ("--min-np", "1", "--min-interrupt-distance", "0.2", "--cooldown-range", "0", "0")


class Member:
    """One worker of a world, from its values at the begin of the world."""

    def __init__(self, line: Line) -> None:
        self.slot = int(line["slot"])
        self.model, self.optimizer = inner_steps.make_training(0)
        self.samples = [int(n) for n in line["samples"]]
        self.set(np.array(line["inner"]))
        begin = 0
        for p in self.model.parameters():
            values = torch.tensor(line["momentum"][begin : begin + p.numel()], dtype=torch.float64)
            self.optimizer.state[p]["momentum_buffer"] = values.view_as(p)
            begin += p.numel()

    @property
    def inner(self) -> Any:
        return np.array(inner_steps.flat(self.model.parameters()))

    def set(self, values: Any) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), self.model.parameters())

    def train(self, step: int) -> None:
        inner_steps.inner_step(self.model, self.optimizer, self.slot, step)
        self.samples = [n + inner_steps.samples_of(self.slot, step) for n in self.samples]


class Outer:
    """Outer parameters with Nesterov momentum, or, without ``fragments``, the average of the members."""

    def __init__(self, outer: Any, momentum: Any, fragments: int) -> None:
        self.values, self.momentum, self.fragments = np.array(outer), np.array(momentum), fragments

    def step(self, members: list[Member], fragment: int) -> None:
        """The 15 parameters and 4 of the two layers: a weight of 12 and biases are fragments by their bytes."""
        part = slice(0, None) if self.fragments < 2 else (slice(0, 12), slice(12, None))[fragment]
        weights = np.array([member.samples[fragment] for member in members], dtype=np.float64)
        mean = (np.stack([member.inner[part] for member in members]) * weights[:, None]).sum(0) / weights.sum()
        if self.fragments == 0:
            self.values[part] = mean
        else:
            gradient = self.values[part] - mean
            self.momentum[part] = 0.9 * self.momentum[part] + gradient
            self.values[part] -= 0.7 * (gradient + 0.9 * self.momentum[part])
        for member in members:
            inner = member.inner
            inner[part] = self.values[part]
            member.set(inner)
            member.samples[fragment] = 0


def check(job: Job, fragments: int, commit_every: int) -> None:
    """Compare every commit of the job with what its members must have then."""
    enters, commits = job.log("enter"), job.log("commit")
    momentum: dict[int, Any] = {0: np.zeros(len(enters[0]["outer"]))}  # of the outer optimizer, by step
    outer: dict[int, Any] = {}  # by step: what the last world that passed the step had
    own: dict[tuple[int, int], Line] = {}  # by slot and step: the last commit
    for generation in sorted({line["generation"] for line in enters}):
        lines = sorted((line for line in enters if line["generation"] == generation), key=lambda line: line["rank"])
        assert [line["rank"] for line in lines] == list(range(lines[0]["size"])), lines
        start = lines[0]["step"]
        assert {line["step"] for line in lines} == {start}
        assert all(line["outer"] == lines[0]["outer"] for line in lines)
        for line in lines:
            check_begin(line, own.get((line["slot"], start)), outer.get(start))
        members = [Member(line) for line in lines]
        now = Outer(lines[0]["outer"], momentum[start], fragments)
        committed = [line for line in commits if line["generation"] == generation]
        parts = max(fragments, 1)
        for step in range(start + 1, max([start, *(line["step"] for line in committed)]) + 1):
            for member in members:
                member.train(step - 1)
            number, rest = divmod(step, EVERY // parts)
            if rest == 0:
                now.step(members, (number - 1) % parts)
            outer[step], momentum[step] = now.values.copy(), now.momentum.copy()
            made = {line["slot"]: line for line in committed if line["step"] == step}
            assert not made or rest == 0 or (commit_every and step % commit_every == 0)
            for member in members:
                if line := made.get(member.slot):
                    own[member.slot, step] = line
                    np.testing.assert_allclose(line["outer"], now.values, rtol=1e-11, atol=1e-13)
                    np.testing.assert_allclose(line["inner"], member.inner, rtol=1e-11, atol=1e-13)
                    assert line["samples"] == member.samples
        check_pace([line for line in job.log("trained") if line["generation"] == generation], committed)
    finals = job.log("final")
    assert len({str((line["outer"], line["inner"], line["step"])) for line in finals}) == 1
    assert finals[0]["outer"] == finals[0]["inner"]


def check_pace(trained: list[Line], committed: list[Line]) -> None:
    """No rank commits a step before all others have trained it: each tick has a collective."""
    for line in committed:
        late = [other["rank"] for other in trained if other["step"] == line["step"] and other["time"] > line["time"]]
        assert not late, (line["step"], late)


def check_begin(line: Line, own: Line | None, outer: Any) -> None:
    """A worker begins a world with what it has committed itself, or at the outer parameters."""
    if outer is not None:
        np.testing.assert_allclose(line["outer"], outer, rtol=1e-11, atol=1e-13)
    names = ("inner", "momentum", "samples")
    if own is None or [line[name] for name in names] != [own[name] for name in names]:
        assert own is None or own["pid"] != line["pid"] or line["generation"] > own["generation"] + 1
        assert line["inner"] == line["outer"]
        assert set(line["samples"]) == {0}


@pytest.mark.parametrize(
    ("fragments", "commit_every"), [(2, 4), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 0), (1, 2)))]
)
def test_a_job_with_kills_a_leave_and_a_join_trains_as_the_formulas_say(
    tmp_path: Path, fragments: int, commit_every: int
) -> None:
    draw = random.Random(fragments)
    kills = [f"kill@{draw.randrange(at, at + 2)}:rank={draw.randrange(2)}" for at in (16, 40)]
    hosts, until = Hosts(tmp_path).set("localhost:3"), tmp_path / "until"
    command = [str(SCRIPTS / "local_sgd.py"), "--log", str(tmp_path / "logs"), "--until", str(until)]
    command += ["--every", str(EVERY), "--fragments", str(fragments), "--commit-every", str(commit_every)]
    command += [word for kill in kills for word in ("--fault", kill)]
    with Job(tmp_path, "-np", "3", *FAST, *hosts.options, command=[sys.executable, *command]) as job:

        def world(size: int, joined: int | None = None) -> None:
            job.wait_for(f"a world of {size}", lambda: job.log("enter")[-1:] and job.log("enter")[-1]["size"] == size)

        job.wait_for("the first kill", lambda: job.fired() == 1)
        job.wait_for("the second kill", lambda: job.fired() == 2)
        world(3)
        hosts.set("localhost:2")
        world(2)
        hosts.set("localhost:3")
        world(3)
        generation = job.log("enter")[-1]["generation"]
        job.wait_for("a commit", lambda: any(line["generation"] == generation for line in job.log("commit")))
        until.touch()
        job.finish()
        assert job.fired() == 2
        check(job, fragments, commit_every)
        starts = {line["step"] % EVERY for line in job.log("enter")}
        assert bool(starts - {0}) == (fragments > 1 or commit_every > 0), "worlds began between two outer steps"
