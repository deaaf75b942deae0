"""The contract between run loop and context, for each backend: one suite, real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from elasticstate.mpi.driver_part import Applicant, Mpirun
from elasticstate.private import open_directory, write_file
from elasticstate.worker.contexts import torch_name
from tests.kit.forks import Template
from tests.kit.processes import command_of
from tests.kit.ranks import SOON_S, Rank, Ranks

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU, and torch sees none here")
# torch with NCCL creates its groups in code that the fake does not replace
REAL_NCCL = pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL, which the fake cannot replace")
NO_NCCL2 = pytest.mark.skipif(not torch_name("nccl2"), reason="this torch has no nccl2")
FAKES = {
    "fake nccl": ("nccl", {"names": ["nccl"]}),  # torch up to 2.13
    "fake nccl-legacy": ("nccl", {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}),  # torch 2.15
    "fake nccl2": ("nccl2", {"names": ["nccl-legacy", "nccl2", "nccl"], "nccl_is": "nccl2"}),
}
GPUS = [pytest.param("nccl", marks=NO_GPU), pytest.param("nccl2", marks=[NO_GPU, NO_NCCL2])]
LATER = ("fake nccl2", "fake nccl-legacy")  # of torch 2.15
ALL_FAKES = [pytest.param(name, marks=REAL_NCCL) for name in FAKES]
FAKE = [pytest.param("fake nccl", marks=REAL_NCCL)]
FAKE += [pytest.param(name, marks=[REAL_NCCL, pytest.mark.long]) for name in LATER]


@pytest.fixture
def mpirun(tmp_path: Path) -> Iterator[Mpirun]:
    """The mpirun of the test. It starts when the first rank asks for an identity, as in a job."""
    running = Mpirun(tmp_path, SOON_S)
    yield running
    running.stop()
    assert not [process for process in psutil.process_iter() if str(tmp_path) in command_of(process)]


def give_identities(mpirun: Mpirun, members: list[Applicant]) -> None:
    """Give identities to the ranks, as the driver and the agents do."""
    mpirun.request_identities(members)
    deadline = time.monotonic() + SOON_S
    for member in members:
        while (identity := mpirun.identity(member)) is None:
            assert time.monotonic() < deadline, f"no identity for {member}: {mpirun.last_output()}"
            time.sleep(0.002)
        path = Path(identity.path)
        directory = open_directory(path.parent)
        write_file(directory, path.name, json.dumps(dict(identity.environment)).encode())
        os.close(directory)


@pytest.fixture(params=["gloo", "mpi", *FAKE, *GPUS])
def ranks(request: pytest.FixtureRequest, template: Template, tmp_path: Path, mpirun: Mpirun) -> Iterator[Ranks]:
    backend, *fake = FAKES.get(request.param, (request.param,))
    made = Ranks(
        template,
        "context_rank.py",
        backend,
        "STORE",
        str(tmp_path),
        *map(json.dumps, fake),
        asked=lambda members: give_identities(mpirun, [Applicant(*member) for member in members]),
    )
    yield made
    made.end()


def all_do(members: list[Rank], command: str, within_s: float = SOON_S) -> list[dict[str, object]]:
    for rank in members:
        rank.begin(command)
    answers = [rank.hear("done", within_s) for rank in members]
    assert [answer["error"] for answer in answers] == [None] * len(members)
    return answers


@pytest.mark.parametrize("ranks", ["gloo", "mpi", *ALL_FAKES, *GPUS], indirect=True)
def test_collectives_in_worlds_that_shrink_and_grow(ranks: Ranks) -> None:
    members = ranks.boot(3)
    for name, count in (("three", 3), ("two", 2), ("one", 1), ("four", 4)):
        members += ranks.boot(max(0, count - len(members)))
        for left in members[count:]:
            left.end()
        del members[count:]
        ranks.create(name, members)
        all_do(members, "collectives", 4 * SOON_S)
        if count == 3:
            all_do(members, "subgroup 0,1,2")
            all_do([members[0], members[2]], "subgroup 0,2")
            all_do([members[0], members[2]], "subgroup 0,2")
            all_do(members[1:], "subgroup 1,2")
        answers = all_do(members, "held")
        assert not any(answer["broken"] for answer in answers)
        all_do(members, "leave")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_collective_is_cut_from_another_thread(ranks: Ranks, victim: int) -> None:
    """One rank is stopped, and killed while the others are being severed, as its agent would do."""
    members = ranks.boot(3)
    ranks.create("first", members)
    stopped = members.pop(victim)
    stopped.process.send_signal(signal.SIGSTOP)
    for rank in members:
        rank.begin("hang")
        rank.tell("sever")
    stopped.end()
    for rank in members:
        answer = rank.hear("done")
        assert answer["error"]
        assert "nobody has cut it" not in answer["error"]
        assert answer["broken"]
    all_do(members, "leave")
    ranks.create("second", members)
    all_do(members, "collectives", 4 * SOON_S)


def test_all_live_and_the_generation_is_cut(ranks: Ranks) -> None:
    members = ranks.boot(3)
    ranks.create("first", members)
    for rank in members[:2]:
        rank.begin("hang")  # the third rank does not take part
    for rank in members:
        rank.tell("sever")
    for rank in members[:2]:
        answer = rank.hear("done")
        assert answer["error"]
        assert answer["broken"]
    all_do(members, "leave")
    ranks.create("second", members)
    all_do(members, "collectives", 4 * SOON_S)


def test_the_end_comes_while_a_member_is_missing(ranks: Ranks) -> None:
    members = ranks.boot(2)
    for number, rank in enumerate(members):
        rank.begin(f"create ended {number} 3")
    ranks.wait_for_keys(2)
    for rank in members:
        rank.tell("sever")
    for rank in members:
        assert rank.hear("done")["error"]
    all_do(members, "leave")
    ranks.create("second", members)
    all_do(members, "collectives", 4 * SOON_S)


def test_what_an_error_says(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    members = ranks.boot(2)
    ranks.create("first", members)
    for kind, fault in (("user", "UNKNOWN"), ("store", "GENERATION")):
        assert [answer["fault"] for answer in all_do(members, f"error {kind}")] == [fault] * 2
    assert not any(answer["broken"] for answer in all_do(members, "held"))
    members[1].end()
    members[0].begin("error death")
    if "nccl" in request.node.callspec.params["ranks"]:
        members[0].tell("sever")  # its collective hangs until then
    survivor = members[0].hear("done")
    assert survivor["error"] is None
    assert survivor["fault"] == "GENERATION" or survivor["broken"], "the fact behind the error is known"


def test_fifty_worlds_leave_nothing_behind(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """Every second world is severed in the middle of a collective.

    Open MPI 5.0.11 never frees the buffer of a non-blocking all-reduce that is cut. The threads of the fake NCCL leave
    freed buffers in memory pools of their own. So the buffers of both are small here.
    """
    backend = request.node.callspec.params["ranks"]
    hang = "hang" if backend in ("gloo", "nccl", "nccl2") else "hang small"
    count = 20 if backend in FAKES else 50
    members = ranks.boot(2)
    kept = []
    for number in range(count):
        ranks.create(f"g{number}", members)
        if number % 2:
            for rank in members:
                rank.begin(hang)
                rank.tell("sever")
            for rank in members:
                assert rank.hear("done")["broken"]
        all_do(members, "leave")
        if number in (9, count - 1):
            kept.append(all_do(members, "held"))
    request.node.user_properties.append(("report", f"{kept[0]} after 10 worlds, {kept[1]} after {count}"))
    for before, after in zip(*kept, strict=True):
        assert after["descriptors"] == before["descriptors"]
        assert after["threads"] == before["threads"]
        assert after["bytes"] - before["bytes"] < 16 << 20, (before, after)
        assert after.get("device", 0) - before.get("device", 0) < 64 << 20, (before, after)
