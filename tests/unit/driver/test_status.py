"""The answer to ``elasticrun status``, built from states of the real core."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.membership import Membership, new_membership, step
from elasticstate.core.policy import Policy
from elasticstate.driver.status import status_text

A, B = t.WorkerId("a", 0, 1), t.WorkerId("a", 1, 1)


def after(*events: t.Event) -> Membership:
    m = new_membership(Policy(np=2, min_np=1, max_np=2))
    for event in (t.HostsDiscovered((t.HostSlots("a", 2),)), t.AgentJoined("a"), *events):
        m = step(m, event, 10.0).next
    return m


def ready(worker: t.WorkerId) -> t.WorkerReady:
    return t.WorkerReady(worker, 0, None, None, "127.0.0.1:1")


def test_it_says_who_is_missing_and_since_when() -> None:
    assert status_text("j", after(ready(A)), "1 of at least 2", 13.0).splitlines() == [
        "job j: WAITING for 3.0 s; 1 of at least 2",
        "not in the world:",
        "  a:0#1  ready for 3.0 s",
        "  a:1#1  boots for 3.0 s",
        "waits for:",
        "  a:1 boots for 3.0 s, nothing heard of it",
    ]


def test_it_shows_the_world_by_rank_and_why_a_slot_is_empty() -> None:
    m = after(t.Several((ready(A), ready(B))), t.Heartbeat(A, "train", 1, 7, None), t.WorkerExited(B, None, 9))
    m = step(m, t.WorkerReady(A, 1, None, None, "127.0.0.1:1"), 10.5).next
    assert status_text("j", m, "world 2: 1 workers", 10.6).splitlines() == [
        "job j: RUNNING(2) for 0.1 s; world 2: 1 workers",
        "world 2: 1 of 1 worker alive, on 1 host",
        "  rank 0  a:0#1  regroup, tick 0, last heard 0.1 s ago",
        "not in the world:",
        "  a:1  failed: a:1#1 was killed by SIGKILL",
    ]


def test_it_shows_which_hosts_are_left_alone_until_when_and_why_while_the_others_train() -> None:
    m = new_membership(Policy(np=1, min_np=1, max_np=2))
    for at, event in (
        (10.0, t.HostsDiscovered((t.HostSlots("a", 1), t.HostSlots("b", 1)))),
        (10.0, t.Several((t.AgentJoined("a"), ready(A)))),
        (10.5, t.AgentLost("b", "no route to host")),
        (30.0, t.AgentLost("b", "no route to host")),
    ):
        m = step(m, event, at).next
        m = step(m, t.Several((ready(A),)), at).next
        m = step(m, t.TimePassed(), at + 15.0).next if at == 10.5 else m
    lines = status_text("j", m, "the world trains", 35.0).splitlines()
    until_s = m.hosts["b"].cooldown_until - 35.0
    assert lines[-2:] == [
        "left alone:",
        f"  host b: in cooldown for {until_s:.1f} s: its agent was lost: no route to host (cooldown 2 in a row)",
    ]
    assert 14.0 < until_s < 17.0
    assert "left alone:" not in status_text("j", m, "the world trains", 35.0 + until_s)
