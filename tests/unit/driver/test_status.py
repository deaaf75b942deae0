"""The answer to ``elasticrun status``, built from states of the real core."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from elasticstate.driver.status import overview_of, status_text
from tests.kit.core import CUT_LINK, drive
from tests.kit.policy import policy_of

A, B = t.WorkerId("a", 0, 1), t.WorkerId("a", 1, 1)


def after(*events: t.Event) -> Membership:
    m = new_membership(policy_of(np=2, min_np=1, max_np=2))
    for event in (t.HostsDiscovered((t.HostSlots("a", 2),)), t.AgentJoined("a"), *events):
        m = step(m, event, 10.0).next
    return m


def ready(worker: t.WorkerId) -> t.FromWorker:
    return t.FromWorker(worker, t.Ready(0, None, None, "127.0.0.1:1"))


def status(job: str, m: Membership, reason: str, now: float) -> list[str]:
    return status_text(job, m, figures_of(m, now), reason, now).splitlines()


def test_it_lists_missing_workers_with_times() -> None:
    assert status("j", after(ready(A)), "1 worker ready", 13.0) == [
        "job j: WAITING for 3.0 s; 1 worker ready",
        "not in the world:",
        "  a:0#1  ready for 3.0 s",
        "  a:1#1  booting for 3.0 s",
        "waiting for:",
        "  a:1 is booting for 3.0 s, no heartbeat yet",
    ]


def test_it_shows_the_world_by_rank_and_why_a_slot_is_empty() -> None:
    m = after(
        t.Several((ready(A), ready(B))),
        t.FromWorker(A, t.Stamp(t.Place.TRAIN, 1, 7, None)),
        t.WorkerExited(B, 1, None, 9),
    )
    m = step(m, t.FromWorker(A, t.Ready(1, None, None, "127.0.0.1:1")), 10.5).next
    assert status("j", m, "world 2: 1 worker", 10.6) == [
        "job j: RUNNING(2) for 0.1 s; world 2: 1 worker",
        "since the start of the job 0.6 s ago: 2 generations, 1 failure, downtime unknown (no ticks), 0 commits lost, "
        "0 ticks redone",
        "time: 0.60 s = goodput 0.00 s (0.0%) + world formation 0.10 s (16.7%) + regroup 0.50 s (83.3%)",
        "world 2: 1 of 1 worker alive, on 1 host",
        "  rank 0  a:0#1  regroup, tick 0, last heartbeat 0.1 s ago",
        "not in the world:",
        "  a:1  failed: a:1#1 was killed by SIGKILL",
    ]


def test_it_shows_for_how_long_no_tick_was_completed() -> None:
    still = t.Several(tuple(t.FromWorker(w, t.Stamp(t.Place.TRAIN, 1, 0, None, still_s=61.0)) for w in (A, B)))
    m = step(after(t.Several((ready(A), ready(B)))), still, 75.0).next
    found = status("j", m, "training", 80.0)
    assert found[0].startswith("job j: RUNNING(1) for ")
    assert found[0].endswith("; no tick for 66 s")
    assert found[-2:] == ["waiting for:", "  no tick for 66 s"]


def test_it_lists_hosts_in_cooldown_while_the_others_train() -> None:
    m = new_membership(policy_of(np=1, min_np=1, max_np=2))
    for at, event in (
        (10.0, t.HostsDiscovered((t.HostSlots("a", 1), t.HostSlots("b", 1)))),
        (10.0, t.Several((t.AgentJoined("a"), ready(A)))),
        (10.5, t.AgentLost("b", "is unreachable: no route to host")),
        (30.0, t.AgentLost("b", "is unreachable: no route to host")),
    ):
        m = step(m, event, at).next
        m = step(m, t.Several((ready(A),)), at).next
        m = step(m, t.TimePassed(), at + 15.0).next if at == 10.5 else m
    lines = status("j", m, "training", 35.0)
    until_s = m.hosts["b"].cooldown_until - 35.0
    assert lines[-2:] == [
        "in cooldown:",
        f"  host b: agent is unreachable: no route to host, in cooldown for {until_s:.1f} s: its agent was lost "
        "(cooldown 2 in a row)",
    ]
    assert 14.0 < until_s < 17.0
    assert "in cooldown:" not in status("j", m, "training", 35.0 + until_s)


def test_it_shows_links_that_are_cut_and_who_waits_for_them() -> None:
    m, _ = drive(CUT_LINK, min_np=1)
    assert status("j", m, "training", 12.5)[-6:] == [
        "not in the world:",
        "  c:0#1  ready for 0.4 s",
        "in cooldown:",
        "  host c: in cooldown for 9.9 s: host b gets no answer from host c",
        "cut links:",
        "  host b gets no answer from host c, for 0.5 s",
    ]
    assert overview_of("j", m, "training", 12.5)[0].cut_links == ("host b gets no answer from host c, for 0.5 s",)
