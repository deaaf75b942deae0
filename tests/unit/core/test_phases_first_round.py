"""The end of a job whose workers all fail before any worker is READY, and the jobs that go on in spite of failures."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.state import Membership
from elasticstate.core.step import next_deadline
from tests.kit.core import drive, ended

TWO_START = "0.0 hosts a:2\n0.1 agent-joined a\n"
SIZE = {"np": 2, "min_np": 2, "max_np": 2}


def goes_on(script: str, **policy: object) -> Membership:
    m, effects = drive(script, **{**SIZE, **policy})
    assert not [effect for effect in effects if isinstance(effect, t.EndJob)]
    assert m.phase_name == "WAITING"
    return m


def root_cause(script: str, **policy: object) -> t.RootCause:
    _, effects = drive(script, **{**SIZE, **policy})
    assert not [effect for effect in effects if isinstance(effect, t.StartWorker)]
    cause = ended(effects).root_cause
    assert cause is not None
    return cause


# -------------------------------------------------------------------------------------------------- the job has failed


def test_the_job_fails_with_the_first_error_when_each_worker_has_failed() -> None:
    m = goes_on(TWO_START + "1.0 exit a:1#1 code=2 error=NoFile")
    assert m.slots[t.SlotId("a", 1)].worker is None, "no restart yet: the other worker may fail, too"
    cause = root_cause(TWO_START + "1.0 exit a:1#1 code=2 error=NoFile\n1.4 exit a:0#1 code=2 error=NoFile")
    assert cause.reason == "every worker failed before the first world; first failure: a:1#1 exited with 2"
    assert (cause.worker, cause.exit_code, cause.error) == (t.WorkerId("a", 1, 1), 2, "NoFile")


def test_a_job_of_one_worker_fails_with_its_first_worker() -> None:
    script = "0.0 hosts a:1\n0.1 agent-joined a\n1.0 exit a:0#1 code=1"
    assert "every worker" in root_cause(script, np=1, min_np=1, max_np=1).reason


def test_slots_beyond_max_np_do_not_count() -> None:
    script = "0.0 hosts a:2 b:8\n0.1 agent-joined a + agent-joined b\n1.0 exit a:0#1 code=1\n"
    assert "every worker" in root_cause(script + "1.5 exit a:1#1 code=1").reason


def test_workers_beyond_np_belong_to_the_first_round() -> None:
    script = "0.0 hosts a:3\n0.1 agent-joined a\n1.0 exit a:0#1 code=1 + exit a:1#1 code=1"
    goes_on(script, max_np=None)
    assert "every worker" in root_cause(script + "\n1.5 exit a:2#1 code=1", max_np=None).reason


# -------------------------------------------------------------------------------------------------- the job goes on


def test_a_round_with_a_failure_starts_again_if_another_worker_finishes_at_the_same_time() -> None:
    m = goes_on(TWO_START + "1.0 exit a:1#1 code=1 + exit a:0#1 code=0")
    end = next_deadline(m)
    assert end is not None
    assert end < 3.0, "the round does not wait for ever"
    _, effects = drive(f"{end} time", m)
    started = [effect.worker for effect in effects if isinstance(effect, t.StartWorker)]
    assert started == [t.WorkerId("a", 0, 2), t.WorkerId("a", 1, 2)]


def test_a_slot_that_has_failed_is_restarted_alone_if_the_command_is_elastic() -> None:
    m = goes_on(TWO_START + "0.5 run a:1#1\n1.0 exit a:0#1 code=1")
    assert next_deadline(m) == 2.0
    m, effects = drive("2.0 time", m)
    assert t.StartWorker(t.WorkerId("a", 0, 2)) in effects
    m, _ = drive("3.0 exit a:0#2 code=1\n4.2 time", m)
    assert m.slots[t.SlotId("a", 0)].worker == t.WorkerId("a", 0, 3)
    _, effects = drive("5.0 exit a:0#3 code=1", m)
    cause = ended(effects).root_cause
    assert cause is not None
    assert cause.reason.startswith("1 slot failed 3 times in a row before the first world")


def test_workers_wait_for_hosts_that_may_dial_in() -> None:
    hosts = "0.0 hosts a:1\n0.1 agent-joined a\n"
    policy = {"np": 2, "min_np": 1, "listen": "0.0.0.0:4444", "join_window_s": 5.0}
    m = goes_on(hosts, **policy)
    assert not m.workers
    m, _ = drive("3.0 hosts a:1 b:1 + agent-joined b", m)
    assert len(m.workers) == 2
    m = goes_on(hosts + "5.1 time", **policy)
    assert len(m.workers) == 1, "nobody else came"
    assert len(goes_on(hosts, **{**policy, "listen": None}).workers) == 1


def test_the_delay_before_a_restart_is_short_compared_with_the_start_time_out() -> None:
    m = goes_on(TWO_START + "1.0 exit a:0#1 code=1", start_timeout_s=5.0)
    assert next_deadline(m) == 1.5


@pytest.mark.parametrize("end", ["signal=9", "code=127 unstarted=1"])
def test_a_worker_that_was_killed_or_not_started_is_no_proof_against_the_script(end: str) -> None:
    m = goes_on(TWO_START + f"1.0 exit a:0#1 {end}\n1.5 exit a:1#1 code=1")
    assert len(m.workers) == 2
    goes_on(TWO_START + f"1.0 exit a:0#1 code=1\n1.5 exit a:1#1 {end}\n2.0 exit a:0#2 code=1")


def test_a_worker_that_was_lost_with_its_host_is_no_proof_against_the_script() -> None:
    script = "0.0 hosts a:1 b:1\n0.1 agent-joined a + agent-joined b\n0.5 agent-lost b is unreachable\n"
    goes_on(script + "1.0 exit a:0#1 code=1")


def test_fewer_failures_than_np_are_no_proof_against_the_script() -> None:
    goes_on("0.0 hosts a:1 b:1\n0.1 agent-joined a\n1.0 exit a:0#1 code=1", min_np=1)


def test_a_worker_that_has_finished_is_proof_for_the_script() -> None:
    goes_on(TWO_START + "1.0 exit a:0#1 code=0\n1.5 exit a:1#1 code=1")


def test_failures_after_a_worker_was_ready_do_not_end_the_job() -> None:
    m = goes_on(TWO_START + "1.0 ready a:0#1\n2.0 exit a:0#1 code=1\n2.1 exit a:1#1 code=1")
    assert len(m.workers) == 2, "both are restarted at once"


def test_a_worker_that_could_not_be_started_has_no_exit_code() -> None:
    m = goes_on(TWO_START + "1.0 exit a:0#1 code=127 unstarted=1")
    cause = m.slots[t.SlotId("a", 0)].failure
    assert cause is not None
    assert (cause.reason, cause.exit_code) == ("a:0#1 could not be started", None)


def test_a_worker_that_is_ready_uses_run() -> None:
    m, _ = drive(TWO_START + "1.0 ready a:0#1", **SIZE)
    assert m.workers[t.WorkerId("a", 0, 1)].uses_run


# ----------------------------------------------------------------- as often as torchrun, if the user has said how often


def attempts(*fails: str, **policy: object) -> list[tuple[object, object, object]]:
    """Let each attempt fail in the same way, until the job ends. Return what the events of the attempts say.

    ``fails``: an event for each second, with N for the number of a worker in its slot.
    """
    m, effects = drive(TWO_START, **{**SIZE, "start_timeout_s": 10_000.0, **policy})
    found: list[tuple[object, object, object]] = []
    for number in range(1, 9):
        begin = 100.0 * number
        events = [fail.replace("N", str(number)) for fail in fails]
        for at, event in [*enumerate(events), *((wait, "time") for wait in (5, 30, 60, 90))]:
            m, effects = drive(f"{begin + at} {event}", m)
            notes = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "end"]
            found += [(note.get("attempt"), note.get("attempts"), m.ledger.restarts) for note in notes]
            if any(isinstance(effect, t.EndJob) for effect in effects):
                return found
    raise AssertionError(found)


@pytest.mark.parametrize(
    "fails",
    [
        ["exit a:1#N code=1 + exit a:0#N code=1"],
        ["exit a:1#N code=1", "time", "exit a:0#N signal=15"],
        ["exit a:1#N signal=9", "time", "exit a:0#N signal=15"],
        ["store-joined N", "exit a:1#N code=1", "exit a:0#N signal=15"],
    ],
)
def test_a_script_without_run_is_started_as_often_as_the_user_has_said(fails: list[str]) -> None:
    assert attempts(*fails, reset_limit=3) == [(n, 4, n) for n in range(1, 5)]


@pytest.mark.parametrize(("how", "number"), [("code=1", 3), ("signal=11", 3), ("signal=6", 3)])
def test_without_a_limit_of_the_users_own_three_errors_in_a_row_end_the_job(how: str, number: int) -> None:
    found = attempts("store-joined N", f"exit a:1#N {how}", "exit a:0#N signal=15")
    assert found == [(n, number, n) for n in range(1, number + 1)]


def test_a_kill_from_outside_is_no_error_of_the_script() -> None:
    with pytest.raises(AssertionError, match="8, None, 8"):  # the job goes on
        attempts("store-joined N", "exit a:1#N signal=9", "exit a:0#N signal=15")


def test_without_a_limit_of_the_users_own_an_attempt_counts_once() -> None:
    found = attempts("exit a:1#N code=1", "time", "exit a:0#N signal=15")
    assert found == [(1, 3, 1), (2, 3, 2)]  # the third one ends the job
