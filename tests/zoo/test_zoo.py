"""The zoo: each program is run undisturbed, and with kills, a leave and a join at seeded places; both end alike.

The undisturbed run is plain ``python``, a world of one. Programs take turns in how often they commit, and in the
backend. Many programs share a job with others (``programs.GROUPS``): a job costs more than they do.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from keeper import DEVICE, FULL, Plan, Strike, hosts, write_plan

from tests.kit import forks
from tests.kit.job import Job

ZOO = Path(__file__).parent
NAMES = programs.TESTED
TURNS = {name: turn for turn, name in enumerate(NAMES)}
EVERY = (1, 3, 50)
OPTIONS = (
    "--min-np",
    "1",
    "--discovery-interval",
    "0.25",
    "--min-interrupt-distance",
    "0.2",
    "--cooldown-range",
    "1",
    "1",
)


def plan_of(name: str) -> Plan:
    """Return what happens to a program: strikes, of which some are at places of its own, and a leave and a join."""
    dice = random.Random(name)
    places = [dice.choice(some) for some in programs.PLACES[name]]
    ranks = [dice.choice((0, 1)) for _ in places[1:]] + [dice.choice((0, 1, -1))]
    window = 20 // len(places)
    steps = [4 + window * number + dice.randrange(max(1, window - 2)) for number in range(len(places))]
    strikes = tuple(map(Strike, places, steps, ranks))
    return Plan(EVERY[TURNS[name] % 3], strikes, dice.randrange(27, 30), dice.randrange(31, 35))


def undisturbed(name: str, directory: Path) -> dict[str, Any]:
    """Run a program in plain Python. Return its result."""
    directory.mkdir()
    write_plan(directory / "plan.json", Plan())
    command = [ZOO / "programs.py", name, directory]
    ended = forks.Started(forks.template(), directory / "alone", command, forks.environment())
    status, _, error = ended.finish(60)
    assert status == 0, error[-4000:]
    return result(directory / "result-0.pt")


def result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False, map_location="cpu")
    return found


@pytest.mark.parametrize(
    ("name", "start"),
    [
        *(pytest.param(name, (), id=name) for name in NAMES),
        pytest.param(NAMES[1], ("--preload=off",), id=f"{NAMES[1]}, new processes", marks=pytest.mark.long),
    ],
)
def test_a_disturbed_program_ends_like_an_undisturbed_one(name: str, start: tuple[str, ...], tmp_path: Path) -> None:
    expected = undisturbed(name, tmp_path / "alone")
    plan, turn = plan_of(name), TURNS[name]
    directory = tmp_path / "disturbed"
    directory.mkdir()
    write_plan(directory / "plan.json", plan)
    (directory / "hosts").write_text(hosts(FULL))
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\nexec cat {directory / 'hosts'}\n")
    script.chmod(0o755)
    options = ["-np", str(FULL), *OPTIONS, "--host-discovery-script", str(script), *start]
    if DEVICE != "cpu":
        options += ["--join-window", "30"]  # for the other host in the first world
    elif turn % 8 == 5:
        options += ["--backend", "mpi"]
    command = [sys.executable, str(ZOO / "programs.py"), name, str(directory)]
    with Job(tmp_path, *options, command=command) as job:
        job.finish(timeout=120)
    check_what_happened(job, plan, directory)
    for rank in range(FULL):
        found = result(directory / f"result-{rank}.pt")
        assert not (differences := list(different(expected, found))), f"rank {rank}: {differences[:10]}"


def check_what_happened(job: Job, plan: Plan, directory: Path) -> None:
    """Check that each strike has killed, and that worker left and came back by plan."""
    assert all((directory / f"struck-{number}").exists() for number in range(len(plan.strikes)))
    assert (directory / "left").exists()
    assert (directory / "joined").exists()
    killed = [event for event in job.events("worker_exited") if event["signal"] == 9]
    replaced = job.output.count("this worker is restarted: it cannot go back to its commit")  # by its own hand
    struck = sum(FULL if strike.rank < 0 else 1 for strike in plan.strikes)
    assert len(killed) == struck + replaced, job.output[-4000:]
    warned = [line for line in job.output.splitlines() if "is in no value of the state" in line]
    assert not warned, "a correct program gets no warning"
    sizes = [event["size"] for event in job.events("world_formed")]
    assert sizes[0] == sizes[-1] == FULL, sizes


def different(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths of values that differ, or have other types or dtypes."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{path}.{key} is in one only" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += different(one[key], other[key], f"{path}.{key}")
        return found
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, pair in enumerate(zip(one, other, strict=True)) for d in different(*pair, f"{path}.{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.is_sparse and other.is_sparse:
            one, other = one.coalesce().to_dense(), other.coalesce().to_dense()
        same = one.dtype == other.dtype and torch.equal(one, other)
    else:
        same = type(one) is type(other) and one == other
    return [] if same else [f"{path}: {one} and {other}"]
