"""The invariants I10, I11, I14, I15 (and I1 to I9 again) in a model of whole jobs: core, links, workers, faults.

Replay a failure with ``play(seed, actions)``: hypothesis prints both numbers, and the error shows the last 60 events.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from tests.kit.simulation.job import FAULTS, play
from tests.kit.simulation.schedules import explore_all

MUST_BE_REACHED = (
    *(
        "world",
        "hold",
        "interrupt",
        "release",
        "escalation",
        "failure",
        "drain",
        "gate",
        "verdict",
        "leave",
        "restored",
    ),
    *("postponed leave", "cooldown gave way", "nothing lost", "I15", "job succeeded", "job failed"),
    *("retained commit awaited", "beyond max_np", "end: StateLostError", "note worker_unresponsive"),
    *("notice", "notice gave way"),
    *("cut", "several hosts cut at once", "all hosts cut", "healed in time", "agent gave up", "evicted"),
    *("cleared before it was back", "stopped while cut off", "returned"),
    *("lease waited for", "state on unreachable hosts", "I16 with 0"),
    *("driver died", "died without a driver", "reattached", "the world goes on", "the world cannot go on"),
    *("the gate was open", "used once more"),
    *("note link_cut", "link restored", "note link_restored", "a part"),
    *(f"fault {name}" for name in FAULTS),
    *(f"time: {part}" for part in ("goodput", "no_driver", "redone_ticks", "drain", "sync", "exit")),
)
RARE = ("retained commit given up", "end: no progress", "I16 with 1")  # once in hundreds or thousands of schedules
MANY = 3000  # schedules, among which are the rare situations, too
reached: Counter[str] = Counter()


def explore(seed: int, actions: int) -> None:
    reached.update(play(seed, actions))
    reached["schedules"] += 1


def test_replicas_never_diverge_and_every_job_ends(schedules: range) -> None:
    explore_all(
        explore,
        schedules,
        reached,
        (*MUST_BE_REACHED, *(RARE if len(schedules) >= MANY else ())),
        seed=st.integers(0, 2**64 - 1),
        actions=st.integers(30, 220),
    )
    assert reached["events"] >= 40 * reached["schedules"]
