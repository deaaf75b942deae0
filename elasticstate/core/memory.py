"""What the memory of slots without a worker holds: commits outlive their workers, in the care of the agents (I3).

As long as a member of the newest world lives that began it with the job's state, its commits decide: whatever all
members have sealed, it has sealed, too. When none lives, the newest commit in memory decides, and its slot is waited
for. What is remembered of a slot is what was last heard: from its worker, or from an agent that has found it.
"""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.records import Draft, Host, Membership, Worker


def remember(d: Draft, seat: t.SlotId, commit: t.CommitId | None) -> None:
    """The newest commit in a slot's memory, as its worker says."""
    slot = d.slots.get(seat)
    if slot is not None and slot.memory != commit:
        d.put_slot(seat, memory=commit)


def found(d: Draft, host: str, commits: dict[int, t.CommitId]) -> None:
    """A host has this in memory, and nothing else."""
    for index in sorted(d.seats_of(host).union(commits)):
        d.put_slot(t.SlotId(host, index), memory=commits.get(index))


def awaited(m: Draft | Membership) -> list[tuple[t.SlotId, t.CommitId]]:
    """Slots whose memory holds a newer commit than all who are READY, the newest first, when memory decides.

    Those of hosts that leave, too, until their agent is told to go: it takes the memory with it.
    """
    if any(_is_on_the_line(m, worker) for worker in m.workers.values()):
        return []
    ready = [worker.ready.commit for worker in m.workers.values() if worker.ready is not None and not worker.gone]
    best = max((commit for commit in ready if commit is not None), default=t.CommitId(0, 0))
    newer = [
        (seat, slot.memory)
        for seat, slot in m.slots.items()
        if slot.memory is not None and slot.memory > best and not _is_given_back(m.hosts[seat.host])
    ]
    newer.sort(key=lambda item: (*(-number for number in item[1]), m.hosts[item[0].host].order, item[0]))
    return newer


def _is_given_back(host: Host) -> bool:
    return bool(host.leaving) and host.agent == "stopping"


def _is_on_the_line(m: Draft | Membership, worker: Worker) -> bool:
    """Whether it lives, was in the newest world, and had the job's state when that began, or has it from then."""
    if worker.gone or worker.late or not 0 < worker.joined == m.generation:
        return False
    commit = worker.ready.commit if worker.ready is not None else worker.commit
    if worker.ready is not None and commit is None:
        return False
    return not worker.lacked or (commit is not None and commit.generation == m.generation)
