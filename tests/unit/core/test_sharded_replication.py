"""Replication: where copies are kept, one commit at a time, and what ends a replication."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elasticstate.core import types as t
from elasticstate.core.sharded import ReplicaHosts
from elasticstate.core.state import Running
from elasticstate.core.step import new_membership
from tests.kit.core import ALL_KEPT, ATTACHED, NEWER, THREE, THREE_HOSTS, attach, drive
from tests.kit.policy import policy_of


def copies(effects: list[t.Effect]) -> list[str]:
    orders = [effect for effect in effects if isinstance(effect, t.Replicate)]
    return [f"{slot_id} on {host}" for effect in orders for slot_id, host in effect.copies]


def forgotten(effects: list[t.Effect]) -> list[tuple[t.CommitId, t.CommitId | None]]:
    return [(effect.before, effect.besides) for effect in effects if isinstance(effect, t.ForgetCopies)]


def is_stopped(effects: list[t.Effect]) -> bool:
    return any(isinstance(effect, t.StopReplication) for effect in effects)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (0, []),
        (None, ["a:0 on a", "a:0 on b", "b:0 on b", "b:0 on c", "c:0 on a", "c:0 on c"]),
        (1, ["a:0 on a", "a:0 on b", "b:0 on b", "b:0 on c", "c:0 on a", "c:0 on c"]),
        (2, [f"{slot}:0 on {host}" for slot in "abc" for host in "abc"]),
        (9, [f"{slot}:0 on {host}" for slot in "abc" for host in "abc"]),
    ],
)
def test_copies_lie_on_the_own_host_and_the_next_ones(replicas: int | None, expected: list[str]) -> None:
    _, effects = attach(replicas=replicas)
    assert copies(effects) == expected


def test_commits_between_two_reports_do_not_stop_replication() -> None:
    """The members commit so often that their last reports have no commit in common."""
    m, _ = attach(replicas=1)
    m, _ = drive("1.2 first a:0#1 in=1\n1.3 " + ALL_KEPT.format("1.0"), m)
    assert m.shards.replicated == t.CommitId(1, 0)
    reports = (
        f"heartbeat {host}:0#1 in=1 ticks={k} commit=1.{k} previous=1.{k - 1}"
        for host, k in zip("abc", (80, 60, 70), strict=True)
    )
    m, effects = drive("3.0 " + " + ".join(reports), m)
    assert m.shards.line == t.CommitId(1, 60), "the newest one that all have sealed"
    (order,) = (effect for effect in effects if isinstance(effect, t.Replicate))
    assert order.commit > t.CommitId(1, 80), "a commit that is still to come"


def test_ticks_with_an_earlier_driver_do_not_count_for_the_rate_of_commits() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')}", m)
    assert isinstance(m.phase, Running)
    m = replace(m, phase=replace(m.phase, since=2.0, earlier_ticks=1_000_000))
    ticks = 1_000_020
    reports = (
        f"heartbeat {host}:0#1 in=1 ticks={ticks + k} commit=1.{ticks + k} previous=1.{ticks + k - 1}"
        for host, k in zip("abc", (8, 0, 4), strict=True)
    )
    m, _ = drive("4.0 " + " + ".join(reports), m)
    assert m.shards.replication is not None
    assert ticks + 8 < m.shards.replication.commit.tick < ticks + 50, "with 14 ticks per second"


def test_a_digest_on_two_hosts_needs_no_copy_on_a_third() -> None:
    _, effects = attach(last_digest=7)
    assert copies(effects) == ["a:0 on a", "b:0 on b", "b:0 on c", "c:0 on c"]


def test_nothing_is_replicated_if_each_digest_is_on_several_hosts_or_all_are_on_one() -> None:
    m, _ = drive("0.0 hosts a:2 b:2\n0.1 agent-joined a + agent-joined b", np=4, min_np=1, max_np=4)
    names = [f"{host}:{slot}#1" for host in "ab" for slot in (0, 1)]
    m, _ = drive("1.0 " + " + ".join(f"ready {name}" for name in names), m)
    m, effects = drive("1.1 attached a:0#1 in=1 digests=1,2,1,2", m)
    assert not copies(effects)
    assert m.shards.layouts
    m, _ = drive("0.0 hosts a:2\n0.1 agent-joined a\n1.0 ready a:0#1 + ready a:1#1", np=2, min_np=1, replicas=1)
    _, effects = drive("1.1 attached a:0#1 in=1 digests=7,8", m)
    assert not copies(effects), "no other host"


def keepers(racks: dict[str, str], count: int) -> dict[str, tuple[str, ...]]:
    """Return the keepers of each host's digest."""
    choose = ReplicaHosts(racks, list(racks), count)
    return {host: choose((host,)) for host in racks}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4, 4), (10, 5), (7, 1), (3, 3, 1), (1, 1, 1), (5,), (300, 200, 500)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_lie_in_other_racks_and_the_load_is_even(sizes: tuple[int, ...], replicas: int) -> None:
    racks = {f"{rack}-{i}": f"r{rack}" for rack, size in enumerate(sizes) for i in range(size)}
    found, load = keepers(racks, 1 + replicas), Counter[str]()
    for host, chosen in found.items():
        assert chosen[0] == host, "the own host first"
        assert len(set(chosen)) == min(1 + replicas, len(racks))
        assert len({racks[name] for name in chosen}) == min(1 + replicas, len(sizes)), "as many racks as possible"
        load.update(chosen[1:])
    for name, copies in load.items():
        size, largest = sizes[int(name[0])], max(sizes)
        if len(sizes) > replicas + 1:
            fair = max(replicas, -(-replicas * largest // (len(racks) - largest)))
        else:  # each rack has a copy of each digest, or there are fewer racks than copies
            fair = max(replicas, -(-(len(racks) - size) // size))
        assert copies <= 2 * fair, (name, load)


def test_without_racks_the_next_hosts_in_the_order_of_discovery_keep_the_copies() -> None:
    found = keepers(dict.fromkeys("dcba", ""), 3)
    assert found == {"d": ("d", "c", "b"), "c": ("c", "b", "a"), "b": ("b", "a", "d"), "a": ("a", "d", "c")}
    found = keepers({"a": "x", "b": "x", "c": "", "d": ""}, 2)
    assert {host: chosen[1] for host, chosen in found.items()}["a"] in "cd", "a host without a rack is elsewhere"


def test_of_several_own_hosts_those_in_different_racks_keep_the_copies() -> None:
    choose = ReplicaHosts({"a": "x", "b": "x", "c": "y", "d": "y", "gone": "x"}, "abcd", 2)
    assert choose(("a", "b", "c")) == ("a", "c")
    assert choose(("a", "b")) == ("a", "b"), "a copy elsewhere would cost bandwidth"
    assert choose(("gone",)) == ("gone", "c"), "the rack of a host that leaves counts"


def test_replicas_lie_in_the_other_rack_that_discovery_names() -> None:
    script = ATTACHED.format(9).replace("a:1 b:1 c:1", "a:1/x b:1/x c:1/y")
    m, effects = drive(script, new_membership(policy_of(**THREE)))
    assert copies(effects) == ["a:0 on a", "a:0 on c", "b:0 on b", "b:0 on c", "c:0 on b", "c:0 on c"]
    assert {host.name: host.rack for host in m.hosts.values()} == {"a": "x", "b": "x", "c": "y"}
    m, _ = drive("2.0 hosts a:1/x b:1/z c:1/y", m)
    assert m.hosts["b"].rack == "z"


def test_one_commit_is_replicated_at_a_time_and_then_older_copies_are_forgotten() -> None:
    m, _ = attach()
    m, effects = drive(f"2.0 {NEWER}", m)
    assert not copies(effects), "a replication is in progress"
    m, effects = drive(f"2.1 {ALL_KEPT.format('1.0')}", m)
    assert forgotten(effects) == [(t.CommitId(1, 0), None)]
    assert len(copies(effects)) == 6, "the next one begins"
    m, effects = drive(f"2.2 {ALL_KEPT.format('1.5')}", m)
    assert forgotten(effects) == [(t.CommitId(1, 5), None)]
    assert m.shards.replicated == t.CommitId(1, 5)
    assert {commit for host in m.hosts.values() for _, commit in host.kept} == {t.CommitId(1, 5)}


def test_a_copy_that_cannot_be_made_ends_the_replication_and_a_commit_to_come_follows_later() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    m, effects = drive("2.1 kept a a:0 1.5 + dropped b b:0 1.5", m)
    assert is_stopped(effects)
    assert not forgotten(effects), "the next attempt may have the same commit"
    assert not copies(effects)
    m, effects = drive("2.5 " + NEWER.replace("1.5", "1.9").replace("1.4", "1.8"), m)
    assert not copies(effects), "half a second has not passed"
    m, effects = drive("2.7 time", m)
    assert len(copies(effects)) == 6
    assert m.shards.replication is not None
    assert m.shards.replication.commit == t.CommitId(1, 12), "with 2.9 ticks per second, 0.7 s after the report of 9"
    waiting, effects = drive("12.6 time", m)
    assert not is_stopped(effects)
    _, effects = drive("12.8 time", waiting)
    assert is_stopped(effects), "10 s are over, and the commit has not come"
    _, effects = drive("2.8 failure a:0#1 in=1", m)
    assert is_stopped(effects), "the commit will not come"


@pytest.mark.parametrize("newest", [5, 9])
def test_while_training_pauses_the_newest_commit_is_replicated(newest: int) -> None:
    """It is older than a commit to come that was given up, and perhaps some of its copies exist."""
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}\n2.1 kept a a:0 1.5 + dropped b b:0 1.5", m)
    beats = NEWER.replace("1.5", f"1.{newest}").replace("1.4", f"1.{newest - 1}")
    m, _ = drive(f"2.5 {beats}", m)
    m, effects = drive("2.7 time", m)
    assert m.shards.replication is not None
    assert m.shards.replication.commit > t.CommitId(1, newest), "a commit to come"
    assert forgotten(effects) == [(t.CommitId(1, newest), t.CommitId(1, 0))], "older copies, which attempts have left"
    m, effects = drive("12.8 time", m)
    assert is_stopped(effects)
    m, effects = drive("13.9 time", m)
    assert m.shards.replication is not None
    assert m.shards.replication.commit == t.CommitId(1, newest)
    assert ("a:0", "a") not in {(str(slot_id), host) for slot_id, host in m.shards.replication.missing} or newest == 9
    m, effects = drive(f"14.0 dropped b b:0 1.{newest}", m)
    assert is_stopped(effects)
    m, effects = drive("16.1 time", m)
    assert len(copies(effects)) == (6 if newest == 9 else 5), "the same commit again, but for a copy that exists"
    m, _ = drive("17.0 " + ALL_KEPT.format(f"1.{newest}"), m)
    assert m.shards.replicated == t.CommitId(1, newest)


def test_copies_of_attempts_that_fail_do_not_add_up() -> None:
    """Each attempt has a commit to come, of which some copies are made. The members never report a common commit."""
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    now, tick, kept = 2.0, 5, set()
    for _ in range(8):
        now, tick = now + 40.0, tick + 80
        beats = [
            f"heartbeat {h}:0#1 in=1 ticks={tick} commit=1.{tick - k} previous=1.{tick - k - 1}"
            for h, k in (("a", 0), ("b", 3), ("c", 6))
        ]
        m, _ = drive(f"{now} " + " + ".join(beats), m)
        present = m.shards.replication
        assert present is not None
        kept.add(present.commit)
        commit = f"1.{present.commit.tick}"
        m, _ = drive(f"{now + 0.1} kept a a:0 {commit} + kept b b:0 {commit} + dropped c c:0 {commit}", m)
        assert m.shards.replication is None
        for host in m.hosts.values():
            assert len({commit for _, commit in host.kept}) <= 3, host.kept
    assert len(kept) == 8
    assert m.shards.replicated == t.CommitId(1, 0)


def test_a_report_of_a_copy_that_was_forgotten_meanwhile_has_no_effect() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}\n2.1 {ALL_KEPT.format('1.5')}", m)
    m, _ = drive("2.2 kept c a:0 1.0", m)
    assert m.hosts["c"].kept == {(t.SlotId(slot, 0), t.CommitId(1, 5)) for slot in "cb"}


def test_a_host_that_refuses_a_copy_is_chosen_last_for_a_minute() -> None:
    m, effects = attach(replicas=1)
    assert "a:0 on b" in copies(effects)
    m, _ = drive(f"2.0 {NEWER}\n2.1 dropped b a:0 1.0 no memory is left", m)
    m, effects = drive("2.7 time", m)
    assert copies(effects) == ["a:0 on a", "a:0 on c", "b:0 on a", "b:0 on b", "c:0 on a", "c:0 on c"]
    assert m.shards.replication is not None
    commit = f"1.{m.shards.replication.commit.tick}"
    kept = "kept a a:0 {0} + kept b b:0 {0} + kept c c:0 {0} + kept c a:0 {0} + kept a b:0 {0} + kept a c:0 {0}"
    m, _ = drive("3.0 " + kept.format(commit), m)
    assert m.shards.replicated is not None
    m, effects = drive("62.0 " + NEWER.replace("1.5", "1.25").replace("1.4", "1.24"), m)
    assert "a:0 on c" in copies(effects)
    m, _ = drive("62.2 " + kept.format("1.25"), m)
    _, effects = drive("62.3 " + NEWER.replace("1.5", "1.29").replace("1.4", "1.28"), m)
    assert "a:0 on b" in copies(effects)


def test_replications_that_fail_in_a_row_are_told_once_with_the_reason() -> None:
    m, effects = attach(replicas=2)
    told = []
    now = 2.0
    for tick in range(5, 60, 6):
        assert m.shards.replication is not None
        commit = m.shards.replication.commit
        m, effects = drive(f"{now} dropped b a:0 {commit.generation}.{commit.tick} host b (1.2.3.4:5): no place", m)
        assert m.shards.replication is None
        told += [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "warning"]
        pause_s = min(30.0, 0.5 * 2 ** (m.shards.failures - 1))
        assert m.shards.not_before == now + pause_s
        now += pause_s + 0.1
        beats = " + ".join(
            f"heartbeat {host}:0#1 in=1 ticks={tick} commit=1.{tick} previous=1.{tick - 1}" for host in "abc"
        )
        m, _ = drive(f"{now} {beats}", m)
        if m.shards.replication is None:  # a commit that is to come needs a second report
            m, _ = drive(f"{now + 0.1} time", m)
    (warning,) = told
    text = dict(warning.fields)["text"]
    assert "3 replications in a row have failed, and none is replicated" in str(text)
    assert "slot a:0 on host b: host b (1.2.3.4:5): no place" in str(text)


def test_a_lost_host_ends_the_replication_and_its_copies_count_again_when_it_is_back() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')} + {NEWER}", m)
    m, effects = drive("2.1 agent-lost c exited", m)
    assert is_stopped(effects)
    assert not forgotten(effects)
    assert m.shards.replication is None
    m, effects = drive("40.0 agent-joined c 0=1.5,1.4 c:0=1.0 b:0=1.0", m)
    assert m.hosts["c"].kept == {(t.SlotId("c", 0), t.CommitId(1, 0)), (t.SlotId("b", 0), t.CommitId(1, 0))}
    assert forgotten(effects) == [(t.CommitId(1, 0), None)], "it may have missed that"


def test_a_host_that_returns_with_older_copies_forgets_them() -> None:
    m, _ = attach()
    m, _ = drive(f"2.0 {ALL_KEPT.format('1.0')}\n2.1 {NEWER}\n2.2 {ALL_KEPT.format('1.5')}\n2.3 agent-lost c exited", m)
    m, effects = drive("40.0 agent-joined c c:0=1.0 c:0=1.5", m)
    assert forgotten(effects) == [(t.CommitId(1, 5), None)]
    assert m.hosts["c"].kept == {(t.SlotId("c", 0), t.CommitId(1, 5))}


def test_copies_that_are_there_already_are_not_awaited() -> None:
    m, _ = drive(THREE_HOSTS, **THREE)
    m, _ = drive("1.05 kept b a:0 1.0 + kept c b:0 1.0", m)
    m, effects = drive(ATTACHED.format(9), m)
    assert copies(effects) == ["a:0 on a", "b:0 on b", "c:0 on a", "c:0 on c"], "the others exist"
    _, effects = drive("1.2 kept a a:0 1.0 + kept b b:0 1.0 + kept c c:0 1.0 + kept a c:0 1.0", m)
    assert forgotten(effects) == [(t.CommitId(1, 0), None)]
