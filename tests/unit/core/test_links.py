"""Cut links: when they are looked for, what the core does with the answers, and which part of the workers trains."""

from __future__ import annotations

import random
from itertools import combinations
from time import process_time

import pytest

from elasticstate.core import links, types as t
from elasticstate.core.diagnostics import waiting_for
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline
from tests.kit.core import ALL_KEPT, NEWER, attach, drive, kinds, notes, only, published

THREE = {"np": 3, "min_np": 1, "max_np": 3}
RUNNING = """
0.0 hosts a:1 b:1 c:1
0.1 agent-joined a + agent-joined b + agent-joined c
1.0 ready a:0#1 + ready b:0#1 + ready c:0#1
1.2 first a:0#1 in=1
5.0 heartbeat a:0#1 in=1 ticks=9 commit=1.9
5.0 heartbeat b:0#1 in=1 ticks=9 commit=1.9
5.0 heartbeat c:0#1 in=1 ticks=9 commit=1.9
"""
STILL = RUNNING + "8.0 heartbeat b:0#1 in=1 ticks=9 commit=1.9 still=2.5\n"
CUT = STILL + "8.1 probed a order=1 + probed c order=1\n12.0 probed b order=1 cut=c\n"
ALL_READY = "12.1 " + " + ".join(f"ready {host}:0#1 in=1 commit=1.9 ticks=9" for host in "abc") + "\n"


def peers(effects: list[t.Effect]) -> dict[str, tuple[str, ...]]:
    order = only(effects, t.ProbeLinks)
    assert isinstance(order, t.ProbeLinks)
    return dict(order.peers)


def members(effects: list[t.Effect]) -> list[str]:
    return [str(place.worker) for place in published(effects).members]


def job(sizes: dict[str, int], **policy: object) -> Membership:
    """Return a job whose world has these workers, by host."""
    names = [f"{host}:{slot}#1" for host, slots in sizes.items() for slot in range(slots)]
    script = f"0.0 hosts {' '.join(f'{host}:{slots}' for host, slots in sizes.items())}\n"
    script += f"0.1 {' + '.join(f'agent-joined {host}' for host in sizes)}\n"
    script += f"1.0 {' + '.join(f'ready {name}' for name in names)}\n1.2 first {names[0]} in=1"
    m, _ = drive(script, **{"np": len(names), "min_np": 1, "max_np": None, **policy})
    return m


def cut(m: Membership, pairs: list[tuple[str, str]], commits: dict[str, str] | None = None) -> list[t.Effect]:
    """Cut links in the world of a job. Return the effects when all have left it."""
    first = next(iter(m.workers))
    m, effects = drive(f"8.0 heartbeat {first} in=1 ticks=9 still=9", m)
    answers = [
        f"probed {host} order=1 cut={','.join(peer for peer in its if (host, peer) in pairs or (peer, host) in pairs)}"
        for host, its in peers(effects).items()
    ]
    m, effects = drive(f"12.0 {' + '.join(answers)}", m)
    assert "End" in kinds(effects)
    ready = (f"ready {worker} in=1 ticks=9 commit={(commits or {}).get(worker.host, '1.9')}" for worker in m.workers)
    return drive(f"12.1 {' + '.join(ready)}", m)[1]


# ------------------------------------------------------------------------------------------------ when links are probed


def test_no_link_is_probed_while_members_move() -> None:
    _, effects = drive(RUNNING + "7.0 heartbeat b:0#1 in=1 ticks=9 still=2.4", **THREE)
    assert "ProbeLinks" not in kinds(effects)


@pytest.mark.parametrize("place", ["train", "regroup"])
def test_all_links_of_the_world_are_probed_once_when_a_member_stands_still(place: str) -> None:
    _, effects = drive(RUNNING + f"8.0 heartbeat b:0#1 in=1 ticks=9 still=2.5 place={place}", **THREE)
    assert peers(effects) == {"a": ("b",), "b": ("c",), "c": ("a",)}


@pytest.mark.parametrize("place", ["gate", "done"])
def test_no_link_is_probed_for_a_member_behind_its_training(place: str) -> None:
    _, effects = drive(RUNNING + f"8.0 heartbeat b:0#1 in=1 ticks=9 still=9 place={place}", **THREE)
    assert "ProbeLinks" not in kinds(effects)


def test_a_world_on_one_host_has_no_links() -> None:
    m = job({"a": 3})
    assert "ProbeLinks" not in kinds(drive("9.0 heartbeat a:0#1 in=1 still=9", m)[1])


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 126])
def test_one_host_of_each_pair_probes_the_other_and_all_have_as_many_to_probe(count: int) -> None:
    m = job({f"h{number}": 1 for number in range(count)})
    its = peers(drive("9.0 heartbeat h0:0#1 in=1 still=9", m)[1])
    pairs = [frozenset((host, peer)) for host, found in its.items() for peer in found]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, combinations(m.hosts, 2)))
    assert max(map(len, its.values())) - min(map(len, its.values())) <= 1


def test_one_agent_probes_64_hosts_at_a_time_and_all_in_turn() -> None:
    m = job({f"h{number}": 1 for number in range(300)})
    m, effects = drive("9.0 heartbeat h0:0#1 in=1 still=9", m)
    found: set[frozenset[str]] = set()
    for at in (14.0, 20.0, 26.0):
        assert max(map(len, peers(effects).values())) <= 64
        found.update(frozenset((host, peer)) for host, its in peers(effects).items() for peer in its)
        answers = (f"probed {host} order={m.ledger.links.number}" for host in m.ledger.links.asked)
        m, effects = drive(f"{at} {' + '.join(answers)}", m)
    assert len(found) == 300 * 299 // 2


def test_a_world_that_goes_on_standing_still_is_probed_again() -> None:
    m, effects = drive(STILL + "8.1 probed a order=1 + probed b order=1 + probed c order=1", **THREE)
    assert "ProbeLinks" not in kinds(effects)
    assert next_deadline(m) == 12.0
    assert peers(drive("12.0 time", m)[1]) == {"a": ("b",), "b": ("c",), "c": ("a",)}
    assert "ProbeLinks" not in kinds(drive("11.0 heartbeat b:0#1 in=1 ticks=10\n12.0 time", m)[1])


def test_an_agent_that_does_not_answer_is_asked_again() -> None:
    m, _ = drive(STILL, **THREE)
    assert next_deadline(m) == 14.5
    assert "ProbeLinks" in kinds(drive("14.5 time", m)[1])


# --------------------------------------------------------------------------------------------------- what they find out


def test_a_cut_link_ends_the_generation_and_its_host_waits_with_the_reason() -> None:
    m, effects = drive(CUT, **THREE)
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert (end.at_tick, end.cause) == (None, "host b gets no answer from host c")
    m, effects = drive(ALL_READY, m)
    assert members(effects) == ["a:0#1", "b:0#1"]
    (waits,) = notes(effects, "host_cooldown")
    assert (waits.get("host"), waits.get("reason")) == ("c", "host b gets no answer from host c")
    assert peers(effects) == {"b": ("c",)}, "the link is probed on"
    assert m.ledger.no_progress == 0


def test_a_cut_link_ends_a_world_that_waits_for_the_tick_of_a_planned_end() -> None:
    script = RUNNING.replace(
        "1.2 first a:0#1 in=1\n", "1.2 first a:0#1 in=1\n1.3 hosts a:1 b:1 c:1 d:1\n1.4 agent-joined d\n"
    )
    script += "7.0 ready d:0#1\n7.1 answer a:0#1 in=1 ticks=9 + answer b:0#1 in=1 ticks=9 + answer c:0#1 in=1 ticks=9\n"
    m, effects = drive(script + "7.2 time", **{**THREE, "max_np": 4})
    assert m.phase_name == "FORMING(2)"
    m, effects = drive(
        "9.7 heartbeat b:0#1 in=1 ticks=9 still=2.5\n13.7 probed a order=1 + probed c order=1 + probed b order=1 cut=c",
        m,
    )
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert (end.at_tick, end.cause) == (None, "host b gets no answer from host c")


def test_a_host_that_stands_still_as_a_whole_is_not_behind_a_cut_link() -> None:
    """Its agent does not answer either, so the heartbeat decides."""
    m, effects = drive(STILL + "8.1 probed a order=1\n12.0 probed b order=1 cut=c", **THREE)
    assert not effects
    assert not drive("14.4 time", m)[1]
    m, effects = drive("14.4 probed c order=1", m)
    assert notes(effects, "link_cut"), "but for one that was only slow"
    assert "End" in kinds(effects)


def test_answers_to_older_orders_or_of_others_have_no_effect() -> None:
    m, _ = drive(STILL + "14.5 time", **THREE)
    for answer in ("probed b order=1 cut=c", "probed d order=2 cut=a"):
        after, effects = drive(f"14.6 {answer}", m)
        assert not effects
        assert not after.ledger.links.cut


def test_after_a_failure_without_a_death_the_next_world_waits_for_probes() -> None:
    script = RUNNING + "6.0 failure a:0#1 in=1 error=RuntimeError\n" + ALL_READY.replace("12.1", "6.1")
    m, effects = drive(script, **THREE)
    assert peers(effects) == {"a": ("b",), "b": ("c",), "c": ("a",)}
    m, effects = drive("6.2 probed a order=1 + probed c order=1", m)
    assert "World" not in kinds(effects)
    assert members(drive("6.3 probed b order=1", m)[1]) == ["a:0#1", "b:0#1", "c:0#1"]
    after, effects = drive("10.1 probed b order=1 cut=c", m)
    assert members(effects) == ["a:0#1", "b:0#1"]
    assert after.ledger.no_progress == 0, "the cut link explains the failure"
    assert members(drive(f"{6.1 + 6.5} time", m)[1]) == ["a:0#1", "b:0#1", "c:0#1"], "they wait for a limited time"


def test_after_a_death_no_link_is_probed() -> None:
    script = RUNNING + "6.0 exit a:0#1 signal=9\n6.1 ready b:0#1 in=1 commit=1.9 + ready c:0#1 in=1 commit=1.9"
    _, effects = drive(script, **THREE)
    assert "ProbeLinks" not in kinds(effects)
    assert members(effects) == ["b:0#1", "c:0#1"]


def test_a_link_that_answers_again_lets_its_host_join_after_the_cooldown_which_grows() -> None:
    m, _ = drive(CUT + ALL_READY + "12.3 first a:0#1 in=2", **THREE)
    m, effects = drive("18.0 probed b order=2", m)
    assert notes(effects, "link_restored")
    until = m.hosts["c"].cooldown_until
    assert "Hold" not in kinds(drive(f"{until - 0.1} time", m)[1])
    m, effects = drive(f"{until} time", m)
    assert "Hold" in kinds(effects)
    m, effects = drive(
        "23.0 answer a:0#1 in=2 ticks=3 + answer b:0#1 in=2 ticks=3\n"
        "23.1 ready a:0#1 in=2 commit=2.4 ticks=4 + ready b:0#1 in=2 commit=2.4 ticks=4",
        m,
    )
    assert members(effects) == ["a:0#1", "b:0#1", "c:0#1"]
    m, _ = drive("24.0 first a:0#1 in=3\n30.0 heartbeat b:0#1 in=3 ticks=9 commit=3.9 still=3", m)
    m, _ = drive("34.0 probed a order=3 + probed b order=3 cut=c + probed c order=3", m)
    ready = (f"ready {host}:0#1 in=3 commit=3.9 ticks=9" for host in "abc")
    (waits,) = notes(drive(f"34.1 {' + '.join(ready)}", m)[1], "host_cooldown")
    seconds = waits.get("seconds")
    assert isinstance(seconds, float)
    assert seconds > 20, "although the job has committed in between"


def test_without_the_other_host_a_restored_link_is_used_at_once() -> None:
    m, _ = drive(CUT + ALL_READY + "12.3 first a:0#1 in=2\n18.0 probed b order=2", **THREE)
    m, effects = drive("19.0 agent-lost a\n19.1 ready b:0#1 in=2 commit=2.4", m)
    assert members(effects) == ["b:0#1", "c:0#1"]


def test_while_a_cut_link_is_probed_another_one_is_found_in_time() -> None:
    m, _ = drive(CUT + ALL_READY + "12.3 first a:0#1 in=2\n14.0 time", **THREE)
    m, effects = drive("14.0 heartbeat a:0#1 in=2 ticks=1 commit=2.1\n17.0 heartbeat a:0#1 in=2 ticks=1 still=3", m)
    assert peers(effects) == {"b": ("c",), "a": ("b",)}
    m, effects = drive("21.0 probed a order=3 cut=b + probed b order=3 cut=c", m)
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.cause == "host a gets no answer from host b"


def test_all_cut_links_of_a_host_are_probed_on() -> None:
    effects = cut(job({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}), [("a", "b"), ("a", "c"), ("a", "d")])
    assert peers(effects) == {"a": ("b", "c"), "d": ("a",)}


@pytest.mark.parametrize("host", ["b", "c"])
def test_a_host_whose_agent_was_lost_is_tried_again(host: str) -> None:
    m, _ = drive(CUT + ALL_READY + f"12.3 first a:0#1 in=2\n13.0 agent-lost {host}", **THREE)
    assert not m.ledger.links.cut
    assert not any(m.ledger.links.asked.values())
    assert not links.enemies(m, host)


def test_too_few_workers_on_hosts_that_reach_each_other_wait_with_the_reason() -> None:
    m, effects = drive(CUT + ALL_READY, **{**THREE, "min_np": 3})
    assert m.phase_name == "WAITING"
    assert "host b gets no answer from host c, for 0.1 s" in waiting_for(m, 12.1)
    m, effects = drive("99.0 time", m)
    m, effects = drive(f"{12.1 + m.policy.elastic_timeout_s} time", m)
    cause = only(effects, t.EndJob)
    assert isinstance(cause, t.EndJob)
    assert cause.root_cause is not None
    assert "missing: host b gets no answer from host c" in cause.root_cause.reason
    assert cause.root_cause.reason.endswith("first failure: host b gets no answer from host c")


def test_a_spare_host_replaces_the_one_behind_a_cut_link() -> None:
    script = CUT.replace("a:1 b:1 c:1\n", "a:1 b:1 c:1 d:1\n").replace(
        "agent-joined c\n", "agent-joined c + agent-joined d\n"
    )
    m, _ = drive(script + ALL_READY + "12.3 first a:0#1 in=2", **THREE)
    assert t.WorkerId("d", 0, 1) in m.workers


# ----------------------------------------------------------------------------------------------- which part trains


def test_the_largest_part_trains() -> None:
    effects = cut(job({"a": 1, "b": 1, "c": 2, "d": 1}), [("b", "c"), ("b", "d")])
    assert members(effects) == ["a:0#1", "c:0#1", "c:1#1", "d:0#1"]


def test_of_equal_parts_the_newest_commit_decides_then_the_age() -> None:
    m = job({"a": 1, "b": 1, "c": 1})
    assert members(cut(m, [("b", "c")])) == ["a:0#1", "b:0#1"]
    assert members(cut(m, [("b", "c")], {"c": "1.10"})) == ["a:0#1", "c:0#1"]


def test_max_np_limits_what_counts_as_larger() -> None:
    m = job({"a": 1, "b": 1, "c": 2}, max_np=2, np=2)
    ready = " + ".join(f"ready {worker} in=1 ticks=9 commit=1.9" for worker in ("a:0#1", "b:0#1"))
    m, effects = drive("8.0 heartbeat a:0#1 in=1 still=9", m)
    assert peers(effects) == {"a": ("b",), "b": ()}
    m, effects = drive(f"12.0 probed a order=1 cut=b + probed b order=1\n12.1 {ready}", m)
    assert len(members(effects)) == 1, "and nobody of c was ready"


def test_a_larger_part_without_the_state_of_the_job_does_not_train() -> None:
    script = """
    0.0 hosts a:1 b:1
    0.1 agent-joined a + agent-joined b
    1.0 ready a:0#1 + ready b:0#1
    1.2 first a:0#1 in=1
    2.0 heartbeat a:0#1 in=1 ticks=9 commit=1.9 + heartbeat b:0#1 in=1 ticks=9 commit=1.9
    3.0 hosts a:1 b:1 c:3
    3.1 agent-joined c
    6.0 ready c:0#1 + ready c:1#1 + ready c:2#1
    6.1 answer a:0#1 in=1 ticks=20 + answer b:0#1 in=1 ticks=20
    6.2 ready a:0#1 in=1 commit=1.21 + ready b:0#1 in=1 commit=1.21
    9.0 heartbeat a:0#1 in=2 place=regroup still=2.6
    13.0 probed a order=1 + probed b order=1 cut=c + probed c order=1 cut=a
    """
    m, effects = drive(script, np=2, min_np=1, max_np=5)
    assert "End" in kinds(effects)
    _, effects = drive(
        "13.1 ready a:0#1 in=2 commit=1.21 + ready b:0#1 in=2 commit=1.21 + ready c:0#1 in=2 + ready c:1#1 in=2 "
        "+ ready c:2#1 in=2",
        m,
    )
    assert members(effects) == ["a:0#1", "b:0#1"]


def test_the_only_holder_of_the_state_is_awaited_if_its_host_drains_behind_a_cut_link() -> None:
    """No other worker has the state, so the job must not go on without the one that leaves, nor give the state up."""
    script = """
    0.0 hosts a:1
    0.1 agent-joined a
    1.0 ready a:0#1
    1.2 first a:0#1 in=1
    2.0 heartbeat a:0#1 in=1 ticks=9 commit=1.9
    3.0 hosts a:1 b:1
    3.1 agent-joined b
    6.0 ready b:0#1
    6.1 answer a:0#1 in=1 ticks=20
    6.2 ready a:0#1 in=1 commit=1.21
    9.0 heartbeat a:0#1 in=2 place=regroup still=2.6
    13.0 probed a order=1 cut=b + probed b order=1
    13.1 agent-draining a spot
    13.2 ready a:0#1 in=2 commit=1.21 + ready b:0#1 in=2
    """
    m, effects = drive(script, np=1, min_np=1, max_np=2)
    assert m.phase_name == "WAITING"
    assert "EndJob" not in kinds(effects)
    m, effects = drive("14.7 probed a order=2", m)
    assert members(effects) == ["a:0#1", "b:0#1"]
    assert published(effects).lacking == (1,)


def test_the_only_holder_of_the_state_that_drains_forms_a_world_with_those_it_reaches() -> None:
    """The other part is as large, and has no state."""
    script = """
    0.0 hosts a:1
    0.1 agent-joined a
    1.0 ready a:0#1
    1.2 first a:0#1 in=1
    2.0 heartbeat a:0#1 in=1 ticks=9 commit=1.9
    3.0 hosts a:1 b:1 c:1
    3.1 agent-joined b + agent-joined c
    6.0 ready b:0#1 + ready c:0#1
    6.1 answer a:0#1 in=1 ticks=20
    6.2 ready a:0#1 in=1 commit=1.21
    9.0 heartbeat a:0#1 in=2 place=regroup still=2.6
    13.0 probed a order=1 cut=b + probed b order=1 + probed c order=1
    13.1 agent-draining a spot
    13.2 ready a:0#1 in=2 commit=1.21 + ready b:0#1 in=2 + ready c:0#1 in=2
    """
    assert members(drive(script, np=1, min_np=1, max_np=3)[1]) == ["a:0#1", "c:0#1"]


def test_a_host_that_reaches_no_other_is_left_out_of_a_hundred_quickly() -> None:
    m = job({f"h{number}": 8 for number in range(100)})
    begun = process_time()
    effects = cut(m, [("h7", f"h{number}") for number in range(100)])
    assert {place.worker.host for place in published(effects).members} == set(m.hosts) - {"h7"}
    assert process_time() - begun < 5.0


def test_the_parts_agree_with_a_naive_second_implementation() -> None:
    rng = random.Random(7)
    for _ in range(60):
        sizes = {name: rng.randint(1, 3) for name in "abcdefg"[: rng.randint(3, 7)]}
        pairs = [pair for pair in combinations(sizes, 2) if rng.random() < rng.choice((0.2, 0.5))]
        m = job(sizes)
        if not pairs:
            continue
        best = max(
            sum(sizes[host] for host in part)
            for size in range(1, len(sizes) + 1)
            for part in combinations(sizes, size)
            if not any(one in part and other in part for one, other in pairs)
        )
        effects = cut(m, pairs)
        found = {place.worker.host for place in published(effects).members}
        assert len(published(effects).members) == best
        assert not any(one in found and other in found for one, other in pairs)


@pytest.mark.parametrize(("replicas", "line", "hosts"), [(1, (1, 5), {"a", "b"}), (0, (1, 8), {"a", "b", "c"})])
def test_a_sharded_job_reads_no_copy_behind_a_cut_link_if_there_are_others(
    replicas: int, line: tuple[int, int], hosts: set[str]
) -> None:
    m, _ = attach(replicas=replicas)
    m, _ = drive(f"2.0 {NEWER}", m)
    if replicas:
        m, _ = drive("2.1 " + ALL_KEPT.format("1.5"), m)
    m, _ = drive("6.0 heartbeat a:0#1 in=1 ticks=8 commit=1.8 previous=1.7 still=3", m)
    m, _ = drive("10.0 probed a order=1 + probed b order=1 cut=c + probed c order=1", m)
    ready = (f"ready {host}:0#1 in=1 commit=1.8 previous=1.7 ticks=8 shards=1" for host in "abc")
    world = published(drive(f"10.1 {' + '.join(ready)}", m)[1])
    assert {place.worker.host for place in world.members} == {"a", "b"}
    assert world.line == t.CommitId(*line)
    assert {source.copy.host for source in world.sources} == hosts


def test_a_larger_part_that_cannot_read_the_state_of_a_sharded_job_does_not_train() -> None:
    """The newcomers have attached nothing yet, and no host but that of the old worker has its shards."""
    script = """
    0.0 hosts a:1
    0.1 agent-joined a
    1.0 ready a:0#1
    1.1 attached a:0#1 in=1 digests=7
    1.2 first a:0#1 in=1
    2.0 heartbeat a:0#1 in=1 ticks=9 commit=1.9 previous=1.8
    3.0 hosts a:1 b:2
    3.1 agent-joined b
    6.0 ready b:0#1 + ready b:1#1
    6.1 answer a:0#1 in=1 ticks=20
    6.2 ready a:0#1 in=1 commit=1.21 previous=1.20
    9.0 heartbeat a:0#1 in=2 place=regroup still=2.6
    13.0 probed a order=1 cut=b + probed b order=1
    """
    m, effects = drive(script, np=1, min_np=1, max_np=3, replicas=0)
    assert "End" in kinds(effects)
    world = published(
        drive("13.1 ready a:0#1 in=2 commit=1.21 previous=1.20 + ready b:0#1 in=2 + ready b:1#1 in=2", m)[1]
    )
    assert [str(place.worker) for place in world.members] == ["a:0#1"]
    assert world.line == t.CommitId(1, 21)


def test_the_only_host_that_has_all_shards_trains_without_the_larger_part() -> None:
    """Host c keeps copies of the shards of a and b, and neither keeps one of its shards."""
    m, _ = attach(replicas=1)
    m, _ = drive("2.0 kept c a:0 1.0 + kept c b:0 1.0 + kept b a:0 1.0", m)
    m, _ = drive("6.0 heartbeat a:0#1 in=1 place=regroup commit=1.0 still=3", m)
    m, _ = drive("10.0 probed a order=1 cut=c + probed b order=1 cut=c + probed c order=1 cut=a", m)
    ready = (f"ready {host}:0#1 in=1 commit=1.0 shards=1" for host in "abc")
    world = published(drive(f"10.1 {' + '.join(ready)}", m)[1])
    assert {place.worker.host for place in world.members} == {"c"}
    assert {source.copy.host for source in world.sources} == {"c"}
