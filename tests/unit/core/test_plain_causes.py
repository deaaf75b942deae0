"""Which end of a worker without ``run`` is the cause, when others end because of it. Oracle: who was killed."""

from __future__ import annotations

import pytest

from elasticstate.core import types as t
from elasticstate.core.step import next_deadline, step
from tests.kit.core import drive

WORLD = "0.0 hosts a:3\n0.1 agent-joined a\n1.0 store-joined 1"
SIZE = {"np": 3, "min_np": 3, "max_np": 3, "failure_grace_s": 1.0}
ERRORS = [
    "RuntimeError: [/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:42685: reset",
    "[rank2]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:1, remote process exited",
    "RuntimeError: Gloo connectFullMesh failed with [/src/third_party/gloo/gloo/transport/tcp/pair.cc:150] no error",
    "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "elasticstate.errors.CollectiveError: a worker has failed after the training",
]


def end(slot: int, code: int | None, error: str = "") -> t.WorkerExited:
    return t.WorkerExited(t.WorkerId("a", slot, 1), 7, code, None if code is not None else 9, error)


def causes(*events: tuple[float, t.Event]) -> list[tuple[float, str]]:
    """Return when the world ended, and why. The core is called at its deadlines, too."""
    m, _ = drive(WORLD, **SIZE)
    found: list[tuple[float, str]] = []
    waiting = list(events)
    while waiting or (not found and (next_deadline(m) or 99.0) < 99.0):
        at = next_deadline(m)
        if waiting and (at is None or waiting[0][0] <= at):
            at, event = waiting.pop(0)
            m, effects, _ = step(m, event, at)
        else:
            assert at is not None
            m, effects, _ = step(m, t.Several(()), at)
        notes = [effect for effect in effects if isinstance(effect, t.Note) and effect.event == "end"]
        found += [(at, str(note.get("cause"))) for note in notes]
    return found


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_a_collective_awaits_the_failure_from_which_it_follows(error: str) -> None:
    events = [(5.0, end(0, 1, f"Traceback (most recent call last):\n{error}\n")), (5.3, end(1, None))]
    assert causes(*events) == [(5.3, "a:1#1 was killed by SIGKILL")]


def test_it_awaits_no_longer_than_the_time_for_evidence() -> None:
    assert causes((5.0, end(0, 1, ERRORS[0]))) == [(6.0, "a:0#1 exited with 1")]


def test_an_own_error_is_awaited_by_nobody() -> None:
    for events in ([(5.0, end(0, 1, "ValueError: mine"))], [(5.0, end(0, None))]):
        assert [at for at, _ in causes(*events)] == [5.0]


def test_if_all_workers_have_ended_the_first_is_the_cause() -> None:
    events = [(5.0 + slot / 10, end(slot, 1, ERRORS[slot])) for slot in range(3)]
    assert causes(*events) == [(5.2, "a:0#1 exited with 1")]
