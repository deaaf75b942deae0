"""A worker that waits for a dead peer is freed at once: in init, in new_group, in the store, in a collective."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.kit.forks import Template
from tests.kit.ranks import SOON_S, Rank, Ranks


@pytest.fixture
def ranks(template: Template) -> Iterator[Ranks]:
    made = Ranks(template, "sever_worker.py", "STORE")
    yield made
    made.end()


def go_on(ranks: Ranks, survivors: list[Rank], name: str = "next") -> None:
    """Let the survivors leave, form the next generation without the dead ranks, and use it."""
    for rank in survivors:
        assert rank.do("leave")["error"] is None
    ranks.create(name, survivors)
    for rank in survivors:
        rank.begin("all_reduce")
    for rank in survivors:
        answer = rank.hear("done")
        assert (answer["error"], answer["broken"]) == (None, False)


def test_a_peer_dies_in_init_after_it_has_published_its_address(ranks: Ranks) -> None:
    first, *others = ranks.boot(4)
    for attempt in range(4):  # in each pair, chance decides which rank connects and which accepts
        victim = ranks.boot(1)[0]
        members = [others[0], victim, others[1], others[2]]
        keys = ranks.store.num_keys()
        for number, rank in enumerate(members):
            rank.begin(f"create broken{attempt} {number} 5")
        ranks.wait_for_keys(keys + 4)
        victim.end()
        first.begin(f"create broken{attempt} 4 5")  # the last address: now all ranks connect, also to the dead victim
        ranks.wait_for_keys(keys + 5)
        survivors = [*others, first]
        for rank in survivors:
            rank.tell("sever")
        for rank in survivors:
            answer = rank.hear("done")
            assert answer["error"] or answer["broken"], "the init came back, and all its pairs live"
        go_on(ranks, survivors, f"next{attempt}")
        for rank in survivors:
            rank.do("leave")


def test_a_peer_dies_in_new_group(ranks: Ranks) -> None:
    members = ranks.boot(3)
    ranks.create("first", members)
    victim, *survivors = members
    for rank in survivors:
        rank.begin("new_group")
    victim.end()
    for rank in survivors:
        rank.tell("sever")
    for rank in survivors:
        assert rank.hear("done")["error"] is not None
    go_on(ranks, survivors)


def test_the_end_comes_before_there_is_a_socket(ranks: Ranks) -> None:
    members = ranks.boot(2)
    for rank in members:
        rank.tell("sever")
    for number, rank in enumerate(members):
        rank.begin(f"create ended {number} 2")
    for rank in members:
        assert rank.hear("done")["error"] is not None
    go_on(ranks, members)


def test_the_end_comes_in_the_middle_of_a_store_wait(ranks: Ranks) -> None:
    members = ranks.boot(2)
    for number, rank in enumerate(members):
        rank.begin(f"create ended {number} 3")  # the third rank never joins
    ranks.wait_for_keys(2)
    for rank in members:
        rank.tell("sever")
    for rank in members:
        assert rank.hear("done")["error"] in ("DistNetworkError", "CollectiveError")  # the latter between two waits
    go_on(ranks, members)


def test_a_connect_to_a_stopped_store_is_cut(ranks: Ranks) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import torch.distributed as d, sys\n"
            "store = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
            "print(store.port, flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        try:
            assert holder.stdout is not None
            port = int(holder.stdout.readline())
            holder.send_signal(signal.SIGSTOP)
            rank = ranks.boot(1)[0]
            rank.begin(f"connect {port}")
            rank.tell("sever")
            assert rank.hear("done")["error"] is not None
        finally:
            holder.kill()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_collective_with_a_stopped_peer_is_cut_and_broken_says_so(ranks: Ranks, victim: int) -> None:
    members = ranks.boot(3)
    ranks.create("first", members)
    stopped = members.pop(victim)
    stopped.process.send_signal(signal.SIGSTOP)
    for rank in members:
        rank.begin("all_reduce")
        rank.tell("sever")
    for rank in members:
        answer = rank.hear("done")
        assert (answer["error"], answer["broken"]) == ("RuntimeError", True)
    go_on(ranks, members)


@pytest.mark.parametrize("root", [0, 1], ids=["while_sending", "while_receiving"])
def test_a_peer_dies_in_the_middle_of_a_large_tensor(ranks: Ranks, root: int) -> None:
    """Gloo wakes operations that have not begun, but not those in progress. These would wait for 120 s."""
    survivor, victim = ranks.boot(2)
    ranks.create("first", [survivor, victim])
    for rank in (survivor, victim):
        rank.begin(f"broadcast {root} {victim.process.pid}")
    assert victim.process.wait(SOON_S) == -signal.SIGKILL
    assert not select.select([survivor.stdout], [], [], 0.5)[0], "it has woken by itself: no need to cut"
    survivor.tell("sever")
    answer = survivor.hear("done")
    assert (answer["error"], answer["broken"]) == ("RuntimeError", True)
    go_on(ranks, [survivor, *ranks.boot(1)])
