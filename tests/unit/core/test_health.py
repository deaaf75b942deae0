"""Hangs in the core: the comparison of the ranks' collectives, and when it is reported."""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.health import DEFAULT_GROUP, compare
from elasticstate.core.state import Membership
from elasticstate.core.step import step
from elasticstate.core.types import Collective, CollectivesReport
from tests.kit.core import RUNNING, drive, kinds, only

HANG = t.FromWorker(t.WorkerId("a", 0, 1), t.GenerationFailure(1, True, "no tick for --hang-timeout of 3 s", hang=True))


def report(*last: tuple[str, int], first: int = 1, stack: str = "", generation: int = 1) -> CollectivesReport:
    """Return the report of a rank that has entered the collectives of these groups up to a number."""
    entered = [
        Collective(group, number, f"{group}: operation {number}")
        for group, end in last
        for number in range(first, end + 1)
    ]
    return CollectivesReport(generation, tuple(entered), stack)


def everywhere(number: int) -> CollectivesReport:
    return report((DEFAULT_GROUP, number))


def test_the_first_collective_that_a_rank_has_not_entered_is_found() -> None:
    found = compare({0: everywhere(9), 1: everywhere(7), 2: everywhere(8)})
    assert found.collective is not None
    assert (found.collective.number, found.entered, found.missing) == (8, (0, 2), (1,))
    text = "default_pg: operation 8 (number 8 of default_pg) was entered by ranks 0, 2 and not by rank 1"
    assert found.text() == text


def test_a_rank_that_has_entered_nothing_is_missing_in_the_group_of_all_ranks() -> None:
    found = compare({0: everywhere(1), 1: CollectivesReport(1, (), "")})
    assert (found.entered, found.missing) == ((0,), (1,))


def test_ranks_outside_a_group_are_not_missing_there() -> None:
    pair = report((DEFAULT_GROUP, 3), ("pair 1", 5))
    late = report((DEFAULT_GROUP, 3), ("pair 1", 4))
    found = compare({0: everywhere(3), 1: pair, 2: late})
    assert found.collective is not None
    assert (found.collective.group, found.entered, found.missing) == ("pair 1", (1,), (2,))


def test_a_rank_without_report_is_named_beside_the_collective_of_the_others() -> None:
    found = compare({0: everywhere(4), 2: everywhere(4)}, silent=(1,))
    assert (found.entered, found.missing, found.silent) == ((0, 2), (), (1,))
    assert found.text().endswith("(number 4 of default_pg) was entered by ranks 0, 2, no report from rank 1")


def test_equal_ranks_hang_elsewhere() -> None:
    assert compare({0: everywhere(4), 1: everywhere(4)}).text() == "all ranks have entered the same collectives"


def hung() -> tuple[Membership, list[t.Effect]]:
    m, _ = drive(RUNNING)
    m, effects, _ = step(m, HANG, 10.0)
    return m, list(effects)


def reported(m: Membership, rank: int, report: CollectivesReport) -> tuple[Membership, list[t.Effect]]:
    m, effects, _ = step(m, t.FromWorker(t.WorkerId("a", rank, 1), report), 10.1)
    return m, list(effects)


def note(effects: list[t.Effect]) -> t.Note:
    (found,) = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "hang"]
    return found


def test_the_end_requests_the_reports_and_the_last_one_completes_them() -> None:
    m, effects = hung()
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert end.hang
    assert end.cause == "a:0#1: no tick for --hang-timeout of 3 s"
    m, effects = reported(m, 0, everywhere(6))
    assert effects == []
    m, effects = reported(m, 1, report((DEFAULT_GROUP, 5), stack="File x"))
    m, effects = reported(m, 2, report((DEFAULT_GROUP, 6), generation=7))
    assert effects == [], "of another generation"
    m, effects = reported(m, 2, everywhere(6))
    assert note(effects).get("missing") == [1]
    assert note(effects).get("stacks") == {"1": "File x"}
    m, effects, _ = step(m, t.WorkerUnresponsive(t.WorkerId("a", 1, 1), "no tick"), 12.0)
    assert kinds(list(effects)) == ["worker_unresponsive"], "it is reported once"


def test_the_verdict_on_a_worker_that_cannot_report_completes_the_reports() -> None:
    m, _ = hung()
    for rank in (0, 2):
        m, effects = reported(m, rank, everywhere(6))
        assert effects == []
    _, found, _ = step(m, t.WorkerUnresponsive(t.WorkerId("a", 1, 1), "no tick"), 12.0)
    assert kinds(list(found)) == ["hang", "worker_unresponsive"]
    assert note(list(found)).get("silent") == [1]


def test_the_next_world_awaits_the_reports_of_members_that_are_ready_for_the_grace() -> None:
    """A member that was freed before the END reached it reports after READY."""
    m, _ = hung()
    ready = "10.2 " + " + ".join(f"ready a:{slot}#1 in=1" for slot in range(3))
    m, effects = drive(ready, m)
    assert not any(isinstance(effect, t.World) for effect in effects)
    for rank in (0, 2):
        m, effects = reported(m, rank, everywhere(6))
        assert effects == []
    _, effects = reported(m, 1, everywhere(5))
    assert note(effects).get("missing") == [1]
    assert isinstance(only(effects, t.World), t.World)
    assert m.deadlines["reports on a hang"] == 10.0 + m.policy.failure_grace_s
    _, found, _ = step(m, t.TimePassed(), 10.0 + m.policy.failure_grace_s)
    assert note(list(found)).get("silent") == [1]
    assert isinstance(only(list(found), t.World), t.World)


def test_the_end_of_another_failure_requests_nothing() -> None:
    _, effects = drive(RUNNING + "2.0 exit a:1#1 signal=9")
    end = only(effects, t.End)
    assert isinstance(end, t.End)
    assert not end.hang
