"""The lease on ticks, as kept by the agent."""

from __future__ import annotations

import time
from pathlib import Path

from elasticstate.agent.supervisor import Lease
from elasticstate.net import messages
from tests.kit.agent import Scene, play


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def test_the_term_counts_from_the_question_however_late_the_answer_comes() -> None:
    lease = Lease()
    before = now_ns()
    first, second = lease.ask(), lease.ask()
    after = now_ns()
    lease.granted(first, 5.0)
    assert before + 5 * 10**9 <= lease.until_ns <= after + 5 * 10**9
    until = lease.until_ns
    lease.granted(second, 5.0)
    assert until <= lease.until_ns <= after + 5 * 10**9


def test_an_answer_that_comes_twice_or_to_no_question_grants_nothing() -> None:
    lease = Lease()
    number = lease.ask()
    lease.granted(number + 1, 5.0)
    assert lease.until_ns == 0
    again = lease.ask()
    lease.granted(again, 5.0)
    until = lease.until_ns
    lease.granted(again, 500.0)
    assert lease.until_ns == until > 0


def test_a_new_agent_asks_before_a_worker_has_started_that_could_make_ticks_without_a_limit(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", lease_s=3.0)
        await scene.hear(messages.Started)
        before = scene.heard[: [type(message) for message in scene.heard].index(messages.Started)]
        assert [m.number for m in before if isinstance(m, messages.Stamps)][:1] == [1]

    play(tmp_path, scenario)
