"""Time of the core for one death and the new world, by number of slots. Run this file as a script.

The facts arrive as the driver sends them: the READYs of all survivors in 16 batches. Prints the sum over all steps from
the death to the published world, its growth from size to size (linear: 4), and the longest single step. The unit is
seconds of CPU time: the core never waits, so the figures do not depend on other load on the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from elasticstate.core.ids import CommitId, HostSlots
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from elasticstate.core.types import (
    AgentJoined,
    Event,
    First,
    FromWorker,
    HostsDiscovered,
    Ready,
    Several,
    WorkerExited,
    World,
)
from elasticstate.options import Options

SIZES = (1024, 4096, 16384)
SLOTS_PER_HOST = 8
BATCHES = 16
LIMIT_S = 1.0


def batches(events: list[Event]) -> Iterable[Event]:
    size = -(-len(events) // BATCHES)
    return (Several(tuple(events[i : i + size])) for i in range(0, len(events), size))


def trained_world(slots: int) -> tuple[Membership, float]:
    """Return a running world of ``slots`` workers, and the CPU time that it took to form this world."""
    m = new_membership(Options(command=(), np=slots, min_np=slots // 2).policy())
    hosts = tuple(HostSlots(f"h{i:05}", SLOTS_PER_HOST) for i in range(slots // SLOTS_PER_HOST))
    began = time.process_time()
    m = step(m, HostsDiscovered(hosts), 0.0).next
    m = step(m, Several(tuple(AgentJoined(host.name) for host in hosts)), 1.0).next
    for batch in batches([FromWorker(w, Ready(0, None, None, f"{w}:1")) for w in m.workers]):
        m = step(m, batch, 2.0).next
    took_s = time.process_time() - began
    assert m.world is not None
    assert m.world.size == slots
    return step(m, FromWorker(m.world.members[0].worker, First(1)), 3.0).next, took_s


def one_death(m: Membership) -> tuple[float, float]:
    """Return the CPU seconds of the whole regroup, and of its longest step."""
    assert m.world is not None
    dead, *survivors = (placement.worker for placement in m.world.members)
    commit = CommitId(1, 10)
    ready: list[Event] = [FromWorker(w, Ready(1, commit, None, f"{w}:1", 10)) for w in survivors]
    published: list[World] = []
    times = []
    for event in (WorkerExited(dead, 1, None, 9), *batches(ready)):
        began = time.process_time()
        m, effects, _ = step(m, event, 4.0)
        times.append(time.process_time() - began)
        published += [effect for effect in effects if isinstance(effect, World)]
    assert [world.size for world in published] == [len(survivors)]
    return sum(times), max(times)


def main() -> int:
    print("| slots | first world, s | one death to the new world, s | growth | longest step, s |")
    print("|---|---|---|---|---|")
    before = 0.0
    for slots in SIZES:
        m, first_s = trained_world(slots)
        whole_s, longest_s = min(one_death(m) for _ in range(3))
        growth = f"{whole_s / before:.1f}" if before else ""
        print(f"| {slots} | {first_s:.3f} | {whole_s:.3f} | {growth} | {longest_s:.3f} |", flush=True)
        before = whole_s
    print(f"limit at {SIZES[-1]} slots: {LIMIT_S:g} s")
    return 0 if before < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
