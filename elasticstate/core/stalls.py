"""Stalls: calls in which some ranks wait for ranks that have not made the call. Lookups and texts; read-only."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from elasticstate.core.phases import Running
from elasticstate.core.records import Draft, Membership, Worker, living_members
from elasticstate.core.texts import SHOWN, listed, ranks_text

Call = tuple[int, int]  # process set, number


def waiting(members: list[Worker]) -> dict[Call, list[Worker]]:
    """Return the members that wait in each call, by rank."""
    found: dict[Call, list[Worker]] = {}
    for worker in members:
        if worker.call is not None and worker.waits_since < inf:
            found.setdefault((worker.call.process_set, worker.call.number), []).append(worker)
    return found


def since(inside: list[Worker]) -> float:
    """Return the time since which the first of these workers waits."""
    return min(worker.waits_since for worker in inside)


def absent(inside: list[Worker], members: list[Worker]) -> list[Worker]:
    """Return the members that must make the call in which those ``inside`` wait, and have not made it."""
    assert inside[0].call is not None
    ranks, waiting_ranks = set(inside[0].call.ranks), {worker.rank for worker in inside}
    return [w for w in members if w.rank not in waiting_ranks and (not ranks or w.rank in ranks)]


def text_of(inside: list[Worker]) -> str:
    """Return the text of the call. A rank in ``join()`` waits for the call of the others."""
    texts = [worker.call.call for worker in inside if worker.call is not None]
    return next((text for text in texts if text != "join()"), "join()")


def absent_text(workers: list[Worker]) -> str:
    """Return ``a:1#1 (rank 1): last call barrier()``, with the rest of the first sixteen workers."""
    return listed((f"{w.id} (rank {w.rank}): {_where(w)}" for w in workers[:SHOWN]), count=len(workers))


def _where(worker: Worker) -> str:
    if worker.in_gate:
        return "in the exit gate"
    if worker.call is None:
        return "no call in this world reported"
    return f"waits in {worker.call.call}" if worker.waits_since < inf else f"last call {worker.call.call}"


def stall_lines(m: Draft | Membership, phase: Running, now: float) -> Iterator[str]:
    """Yield one line for each stall: the missing workers, the call, and the ranks that wait."""
    if not phase.stalls:
        return
    members = living_members(m)
    groups = waiting(members)
    for stall in phase.stalls:
        inside = groups.get(stall.call, [])
        missing = absent(inside, members) if inside else []
        if missing:
            ranks = ranks_text([worker.rank for worker in inside])
            lasted = f"stall for {now - stall.since:.1f} s"
            yield f"{lasted}: {ranks} in {stall.text}; missing: {absent_text(missing)}"
