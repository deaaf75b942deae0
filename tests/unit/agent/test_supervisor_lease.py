"""The lease on ticks, as kept by the agent."""

from __future__ import annotations

import time

from elasticstate.agent.supervisor import Lease


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
