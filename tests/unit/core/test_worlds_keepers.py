"""Keepers and followers of a world (--one-copy-per-host)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elasticstate.core import types as t
from elasticstate.core.commits import has_job_state
from elasticstate.core.state import Draft, Worker
from elasticstate.core.step import new_membership
from elasticstate.core.worlds import choose_keepers
from tests.kit.policy import policy_of

OLD, NEW, NONE = t.CommitId(1, 4), t.CommitId(2, 9), t.CommitId(0, 0)
Member = tuple[str, int, t.CommitId, bool]
"""Host, slot, commit, and True if the worker drains."""


def world(members: Sequence[Member], root: int, one_copy: bool = True) -> t.World:
    """Return a world with its keepers. The ranks are the order of the members."""
    d = Draft(new_membership(policy_of(np=1, min_np=1, one_copy_per_host=one_copy)), 0.0)
    placements = []
    for rank, (host, slot, _, drains) in enumerate(members):
        worker = t.WorkerId(host, slot, 1)
        d.add(Worker(worker, started_at=0.0, draining="notice" if drains else ""))
        placements.append(t.Placement(worker, rank, slot, 1, 0, 0, 1))
    commits = [commit for _, _, commit, _ in members]
    lacking = [r for r, commit in enumerate(commits) if r != root and (commit != commits[root] or commit == NONE)]
    keepers = choose_keepers(d, placements, root, lacking, commits)
    return t.World(3, tuple(placements), len(placements), root, t.as_runs(lacking), "s:1", keepers=keepers)


@pytest.mark.parametrize(
    ("members", "root", "keepers"),
    [
        ([("a", 0, NONE, False), ("a", 1, NONE, False), ("b", 0, NONE, False), ("b", 1, NONE, False)], 0, (0, 2)),
        ([("a", 1, NONE, False), ("a", 0, NONE, False)], 0, (0,)),
        ([("a", 1, NEW, False), ("b", 1, NONE, False), ("b", 0, OLD, False)], 0, (0, 2)),
        ([("a", 0, NEW, False), ("b", 1, NEW, False), ("b", 0, OLD, False)], 0, (0, 1)),
        ([("a", 0, NEW, True), ("a", 2, NONE, False), ("a", 1, NONE, False)], 0, (0, 2)),
        ([("a", 0, NEW, True), ("b", 0, NONE, False)], 0, (0, 1)),
        ([("a", 1, NEW, False), ("a", 0, NEW, False)], 0, (0,)),
    ],
    ids=[
        "lowest slots of a first world",
        "the root of a first world",
        "one with buffers",
        "one with the state",
        "a root that drains, and one beside it",
        "a root that drains alone on its host",
        "the root, though another one has the state, too",
    ],
)
def test_the_root_and_one_member_of_each_host_keep_commits(
    members: list[Member], root: int, keepers: tuple[int, ...]
) -> None:
    found = world(members, root)
    assert found.keepers == keepers
    for rank in range(found.size):
        keeper = found.keeper_of(rank)
        assert keeper in keepers
        assert found.members[keeper].worker.host == found.members[rank].worker.host
        assert found.keeps(rank) == (keeper == rank)


def test_without_the_option_every_member_keeps_commits() -> None:
    found = world([("a", 0, NEW, False), ("a", 1, NONE, False)], 0, one_copy=False)
    assert found.keepers == ()
    assert found.keeps(1)
    assert found.keeper_of(1) == 1


def test_a_follower_never_counts_as_a_holder_of_the_state() -> None:
    newest = world([("a", 0, NEW, False), ("a", 1, NEW, False)], 0)
    m = replace(new_membership(policy_of(np=1, min_np=1, one_copy_per_host=True)), world=newest)
    worker, ready = t.WorkerId("a", 1, 1), t.Ready(newest.generation, NEW, None, "s:1")
    of_world = {"joined": newest.generation, "ready": ready, "commit": NEW}
    assert has_job_state(m, Worker(worker, 0.0, **of_world))
    assert not has_job_state(m, Worker(worker, 0.0, **of_world, keeps=False))
