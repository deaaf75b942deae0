"""The times in the reference of the options are those after which the core acts, by a clock of this test.

Each case runs the core to one decision, which must come at the option's value after the event that the help names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from elasticstate.core import types as t
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline, step
from elasticstate.options import Options
from tests.kit.core import RUNNING, drive

Wanted = Callable[[t.Effect], bool]
DEFAULTS = Options(command=("train",))


@dataclass(frozen=True)
class Case:
    """The option acts ``value`` seconds (default: its own) after ``since`` (default: the last line of the script)."""

    option: str
    script: str
    wanted: Wanted
    value: float | None = None
    since: float | None = None
    id: str = ""
    policy: tuple[tuple[str, object], ...] = ()


def is_a(kind: type[t.Effect]) -> Wanted:
    return lambda effect: isinstance(effect, kind)


def kills(worker: str) -> Wanted:
    return lambda effect: isinstance(effect, t.StopWorker) and str(effect.worker) == worker and effect.kill


def notes(event: str) -> Wanted:
    return lambda effect: isinstance(effect, t.Note) and effect.event == event


def starts(worker: str) -> Wanted:
    return lambda effect: isinstance(effect, t.StartWorker) and str(effect.worker) == worker


def fails_the_generation(effect: t.Effect) -> bool:
    return isinstance(effect, t.End) and effect.at_tick is None


CASES = [
    Case("start_timeout_s", "0.0 hosts a:1", is_a(t.EndJob)),
    Case(
        "start_timeout_s",
        RUNNING + "2.0 exit a:2#1 signal=9\n2.1 ready a:0#1 in=1 + ready a:1#1 in=1\n2.2 first a:0#1 in=2",
        kills("a:2#2"),
        id="boot",
    ),
    Case("elastic_timeout_s", RUNNING + "2.0 hosts a:1\n2.1 agent-lost a is gone", is_a(t.EndJob)),
    Case("regroup_timeout_s", RUNNING + "2.0 failure a:0#1 in=1\n2.0 ready a:1#1 in=1", notes("warning")),
    Case("drain_timeout_s", RUNNING + "2.0 draining a:2#1", is_a(t.StopWorker)),
    Case("hold_timeout_s", RUNNING + "2.0 draining a:2#1", is_a(t.Release)),
    Case("stop_timeout_s", RUNNING + "2.0 stop SIGTERM", kills("a:0#1")),
    Case("collective_timeout_s", RUNNING + "2.0 gate a:0#1 in=1", fails_the_generation),
    Case("join_window_s", "0.0 hosts a:3\n0.1 agent-joined a\n1.0 ready a:0#1\n2.0 ready a:1#1", is_a(t.World)),
    Case(
        "join_window_s",
        RUNNING + "2.0 hosts a:5\n50.0 ready a:3#1",
        is_a(t.Hold),
        id="while another one boots",
        policy=(("max_np", 5),),
    ),
    Case(
        "preemption_window_s",
        RUNNING + "2.0 draining a:2#1",
        is_a(t.Hold),
        value=1.0,
        policy=(("preemption_window_s", 1.0),),
    ),
    Case(
        "preemption_cooldown_s",
        "0.0 hosts a:2 b:1\n0.1 agent-joined a + agent-joined b\n1.0 ready a:0#1 + ready a:1#1 + ready b:0#1\n"
        "1.1 first a:0#1 in=1\n2.0 agent-draining b notice\n2.1 answer a:0#1 in=1 ticks=1 + "
        "answer a:1#1 in=1 ticks=1 + answer b:0#1 in=1 ticks=1\n"
        "2.2 ready a:0#1 in=1 + ready a:1#1 in=1 + ready b:0#1 in=1\n2.3 first a:0#1 in=2\n"
        "2.4 exit b:0#1 code=0\n3.0 agent-lost b exited with 0",
        is_a(t.StartAgent),
    ),
    Case(
        "lease_s",
        "0.0 hosts a:2 b:1\n0.1 agent-joined a + agent-joined b\n1.0 ready a:0#1 + ready a:1#1 + ready b:0#1\n"
        "1.1 first a:0#1 in=1\n2.0 agent-unreachable b sent no heartbeat + ready a:0#1 in=1 + ready a:1#1 in=1",
        is_a(t.World),
        value=1.25 * 8.0,
        policy=(("lease_s", 8.0),),
    ),
    Case(
        "driver_timeout_s",
        "0.0 hosts a:1 b:1 c:2\n0.3 agent-joined a + agent-joined b + agent-joined c\n2.0 ready a:0#1 + ready b:0#1\n"
        "2.2 first a:0#1 in=1\n4.0 agent-unreachable a is silent + agent-unreachable b is silent\n5.0 time\n"
        "8.0 ready c:0#1 + ready c:1#1",
        is_a(t.World),
        value=1.25 * (DEFAULTS.heartbeat_timeout_s + DEFAULTS.driver_timeout_s + DEFAULTS.stop_timeout_s),
        since=4.0,
        id="all are unreachable",
        policy=(("np", 2), ("max_np", 2)),
    ),
    Case(
        "min_interrupt_distance_s",
        RUNNING + "2.0 hosts a:4\n3.0 ready a:3#1\n3.1 answer a:0#1 in=1 ticks=1 + answer a:1#1 in=1 ticks=1 + "
        "answer a:2#1 in=1 ticks=1\n3.2 ready a:0#1 in=1 commit=1.2 + ready a:1#1 in=1 commit=1.2 + "
        "ready a:2#1 in=1 commit=1.2\n3.3 first a:0#1 in=2\n3.4 hosts a:5\n3.5 ready a:4#1",
        is_a(t.Hold),
        since=3.2,
        policy=(("max_np", 5),),
    ),
    Case(
        "stall_check_s",
        RUNNING + "2.0 call a:0#1 in=1 number=7 waits=0 + call a:1#1 in=1 number=6 + call a:2#1 in=1 number=6",
        notes("stall"),
        value=61.0,
        id="one to two seconds later",
        policy=(("stall_check_s", 60.0),),
    ),
    Case("waiting_notice_s", "0.0 hosts a:1", notes("waiting"), value=30.0, id="after 30 s a waiting line"),
    Case("waiting_notice_s", RUNNING + "2.0 gate a:0#1 in=1", notes("waiting"), value=30.0, id="in the exit gate"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.option}{'-' if case.id else ''}{case.id}")
def test_the_core_acts_at_the_time_of_the_reference(case: Case) -> None:
    m, _ = drive(case.script, **dict(case.policy))
    now = float(case.script.strip().splitlines()[-1].split()[0])
    since = now if case.since is None else case.since
    expected = getattr(DEFAULTS, case.option) if case.value is None else case.value
    assert time_of(m, case.wanted, now) - since == pytest.approx(expected, abs=1e-6)


def time_of(m: Membership, wanted: Wanted, now: float) -> float:
    """Return the time of the first wanted effect, if from now on nothing happens but the passing of time."""
    while True:
        at = next_deadline(m)
        assert at is not None, f"no such effect; the last step was at {now:g}"
        now = at
        m, effects, _ = step(m, t.TimePassed(), now)
        if any(map(wanted, effects)):
            return now


def test_the_verdict_on_an_error_comes_after_the_failure_grace_with_the_next_sign_of_life_of_the_others() -> None:
    beat = " + ".join(f"heartbeat a:{slot}#1 in=1 ticks=1" for slot in (1, 2))
    at = 2.0 + DEFAULTS.failure_grace_s
    m, effects = drive(RUNNING + f"2.0 suspect a:0#1 in=1\n{at - 0.01} {beat}\n{at - 0.001} time")
    assert not any(map(is_a(t.ConfirmOwnError), effects))
    _, effects = drive(f"{at} {beat}", m)
    assert any(map(is_a(t.ConfirmOwnError), effects))


def test_a_drain_does_not_wait_for_the_min_interrupt_distance_even_when_a_hold_has_failed() -> None:
    m, _ = drive(RUNNING + "2.0 draining a:2#1\n4.0 time", min_interrupt_distance_s=300.0)
    assert time_of(m, is_a(t.Hold), 4.0) < 2.0 + DEFAULTS.drain_timeout_s / 2


def test_cooldowns_and_their_events_keep_to_the_range_of_the_option() -> None:
    """A host whose agent is lost each time it starts, until its cooldown is the longest."""
    shortest_s, longest_s = DEFAULTS.cooldown_range_s
    m, _ = drive(RUNNING + "1.2 hosts a:3 b:1\n1.3 agent-lost b is gone")
    now, seconds = 1.3, []
    for _ in range(9):
        at = time_of(m, is_a(t.StartAgent), now)
        seconds.append(at - now)
        now = at
        m, effects = drive(f"{now} time\n{now} agent-lost b is gone", m)
        (note,) = filter(notes("host_cooldown"), effects)
        noted = note.get("seconds")
        assert isinstance(noted, float)
        assert shortest_s <= noted <= longest_s
    assert shortest_s <= min(seconds) <= max(seconds) <= longest_s
    assert max(seconds) > longest_s / 2
