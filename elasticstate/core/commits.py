"""Commits without a worker, and work without a commit.

Retained commits are commits in memory that outlive their workers; the agents keep them (I3). While a member of the
newest world lives that began this world with the job's state, the commits of that member decide: it has sealed every
commit that all members have sealed. If no such member lives, the newest retained commit decides, and the core waits for
its slot. The core records the last report about each slot, from its worker or from an agent that found the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from msgspec.structs import replace

from elasticstate.core import types as t
from elasticstate.core.state import Digests, Draft, Host, Membership, Running, Slot, Worker
from elasticstate.core.types import number_of

_REJECTED_KEPT = 16  # generations: no slot holds a commit of an older one


def record_both(
    d: Draft,
    slot_id: t.SlotId,
    commit: t.CommitId | None,
    previous: t.CommitId | None,
    sealed: t.CommitId | None = None,
) -> None:
    """Record the commits in both buffers of a slot. ``sealed``: the newest that was ever sealed there, which may be
    damaged by now."""
    slot = d.slots.get(slot_id)
    if slot is None:
        return
    newest = slot.sealed
    rejected: tuple[t.CommitId, ...] = ()
    if slot.damaged or d.ledger.rejected:
        if commit is not None and previous is not None:
            _accept(d, commit, previous)
        held = [each for each in (commit, previous) if each is not None]
        used = [each for each in held if not is_rejected(d, each)]
        newest = max([newest, *used])
        rejected = tuple(each for each in held if each not in used and each not in slot.damaged)
        commit, previous = (*(each for each in used if each not in slot.damaged), None, None)[:2]
    if commit is not None and commit > newest:
        newest = commit
    if sealed is not None and sealed > newest:
        newest = sealed
    known = slot.sealed, slot.retained, slot.previous, slot.rejected
    if (newest, commit, previous, rejected) != known:
        d.put_slot(slot_id, sealed=newest, retained=commit, previous=previous, rejected=rejected)


def _buffers(slot: Slot) -> tuple[t.CommitId | None, t.CommitId | None]:
    """Return the commits in the buffers of a slot, also those that are not used: the newer one, and the older one."""
    held = (each for each in (*slot.rejected, slot.retained, slot.previous) if each is not None)
    commit, previous = (*sorted(held, reverse=True), None, None)[:2]
    return commit, previous


def record_first(d: Draft, slot_id: t.SlotId, commit: t.CommitId) -> None:
    """Record the first commit of a generation in a slot, unless a later report was faster. The other buffer holds the
    state at the begin of that world, if nothing newer was reported."""
    start = t.CommitId(commit.generation, 0)
    before = max(d.slots[slot_id].retained or start, start)
    if before < commit:
        record_both(d, slot_id, commit, before)


def commit_damaged(d: Draft, event: t.CommitDamaged) -> None:
    """Count a damaged commit as not held, whatever the seals in its slot say. A slot has two buffers."""
    slot, host = d.slots.get(event.slot), d.hosts.get(event.slot.host)
    if slot is None or host is None or host.agent != "joined" or event.commit in slot.damaged:
        return
    d.put_slot(event.slot, damaged=(*slot.damaged, event.commit)[-2:])
    record_both(d, event.slot, *_buffers(slot))
    d.warn(f"commit {event.commit} in the memory of slot {event.slot} is damaged and not used: its checksum is wrong")


def is_rejected(m: Draft | Membership, commit: t.CommitId | None) -> bool:
    """Return True if members differ in the commit, or if it is newer than one in which they do not (divergence.py)."""
    if commit is None or not m.ledger.rejected:
        return False
    return any(commit.generation == last.generation and commit.tick > last.tick for last in m.ledger.rejected)


def may_be_rejected(m: Draft | Membership, commit: t.CommitId) -> bool:
    """Return True if the commit is one of the present generation that is not known to be equal on all members."""
    if m.policy.divergence != "restore" or m.world is None or m.world.size == 1:
        return False
    return commit.generation == m.generation and commit.tick > newest_equal(m)


def newest_equal(m: Draft | Membership) -> int:
    """Return the newest tick of the present generation whose commit is known to be equal on all members."""
    found = m.ledger.digests
    return found.equal if found.generation == m.generation else 0


def put_equal(d: Draft, tick: int) -> None:
    """Record that the commit of this tick of the present generation is known to be equal on all members."""
    found = d.ledger.digests if d.ledger.digests.generation == d.generation else Digests(d.generation)
    d.update_ledger(digests=replace(found, equal=tick, compared=max(found.compared, tick)))


def reject(d: Draft, last: t.CommitId) -> None:
    """Use no commit of this generation that is newer than ``last``, wherever and whenever one is found."""
    known = next((each for each in d.ledger.rejected if each.generation == last.generation), None)
    if known is not None and known.tick <= last.tick:
        return
    _put_rejected(d, known, last)
    for slot_id, slot in list(d.slots.items()):
        if is_rejected(d, slot.retained) or is_rejected(d, slot.previous):
            record_both(d, slot_id, *_buffers(slot))
    for worker in list(d.ready_workers()):
        if worker.ready is not None:
            d.put(worker, ready=without_rejected(d, worker.ready))


def _accept(d: Draft, commit: t.CommitId, previous: t.CommitId) -> None:
    """Use the older commit in a slot after all, if it was rejected: below a newer one, it is equal on all members
    (divergence.py). A driver that began after the verdict does not know that before. No world may have begun since."""
    is_older = previous.generation == commit.generation == d.generation and previous < commit
    if not (is_older and is_rejected(d, previous)):
        return
    found = d.ledger.digests
    if found.generation == d.generation and found.differs is not None and previous.tick >= found.differs[1]:
        return
    _put_rejected(d, next(each for each in d.ledger.rejected if each.generation == previous.generation), previous)
    put_equal(d, previous.tick)
    for slot_id, slot in list(d.slots.items()):
        if slot.rejected:
            record_both(d, slot_id, *_buffers(slot))
    for worker in list(d.ready_workers()):
        if worker.said is not None:
            d.put(worker, ready=without_rejected(d, worker.said))


def _put_rejected(d: Draft, old: t.CommitId | None, last: t.CommitId) -> None:
    others = (each for each in d.ledger.rejected if each is not old)
    d.update_ledger(rejected=(*others, last)[-_REJECTED_KEPT:])


def without_rejected(d: Draft, ready: t.Ready) -> t.Ready:
    """Return READY as from a worker that does not hold rejected commits: it discards them when it enters a world."""
    if not (is_rejected(d, ready.commit) or is_rejected(d, ready.previous)):
        return ready
    left = [each for each in (ready.commit, ready.previous) if each is not None and not is_rejected(d, each)]
    commit, previous = (*left, None, None)[:2]
    return replace(ready, commit=commit, previous=previous)


def replace_commits(d: Draft, host: str, commits: dict[int, t.CommitId], previous: dict[int, t.CommitId]) -> None:
    """Replace the retained commits of a host: the host has these commits in memory, and no others."""
    for index in sorted(d.slots_of(host).union(commits)):
        slot_id = t.SlotId(host, index)
        if slot_id not in d.slots:
            d.put_slot(slot_id)
        record_both(d, slot_id, commits.get(index), previous.get(index))


def awaited(m: Draft | Membership) -> list[tuple[t.SlotId, t.CommitId]]:
    """Return the slots that retain a newer commit than all READY workers, the newest first, if retained commits decide.

    Slots of draining hosts count until their agent is stopped: the agent removes the commits when it stops. A sharded
    job awaits hosts instead (see sharded.py).
    """
    if m.shards.layouts or all(slot.retained is None for slot in m.slots.values()):
        return []
    if any(has_job_state(m, worker) for worker in m.workers.values()):
        return []
    ready = [worker.ready.commit for worker in m.workers.values() if worker.ready is not None and not worker.gone]
    best = max((commit for commit in ready if commit is not None), default=t.CommitId(0, 0))
    given_back = {host.name for host in m.hosts.values() if host.draining and host.agent == "stopping"}
    newer = [
        (slot_id, slot.retained)
        for slot_id, slot in m.slots.items()
        if slot.retained is not None and slot.retained > best and slot_id.host not in given_back
    ]
    newer.sort(key=lambda item: (*(-number for number in item[1]), m.hosts[item[0].host].order, item[0]))
    return newer


def has_job_state(m: Draft | Membership, worker: Worker) -> bool:
    """Return True if the worker lives, was in the newest world, and had or received the job's state in that world.

    A worker that ended ticks without training has an older state than the others. A worker that keeps no commits of
    its own has no state that outlives the world. A worker with a confirmed own error exits, and is never READY again.
    """
    if (
        worker.gone
        or worker.late
        or worker.confirmed_at is not None
        or not worker.keeps
        or not 0 < worker.joined == m.generation
    ):
        return False
    commit = worker.ready.commit if worker.ready is not None else worker.commit
    if worker.ready is not None and (commit is None or worker.ready.behind):
        return False
    return not worker.lacked or (commit is not None and commit.generation == m.generation)


NOTHING = t.CommitId(0, 0)
"""Older than every commit."""


def held(worker: Worker) -> t.CommitId:
    """Return the commit of a READY worker, which equals its live state (I10), or NOTHING."""
    return (worker.ready.commit if worker.ready is not None else None) or NOTHING


def newest(workers: Iterable[Worker]) -> t.CommitId:
    """Return the newest commit of ``workers``, or NOTHING."""
    return max(map(held, workers), default=NOTHING)


def only_holder(draining: Iterable[Worker], stay: Iterable[Worker]) -> Worker | None:
    """Return the READY draining worker with a newer commit than all that ``stay``: it must be in one more world."""
    holder = max(draining, key=lambda w: (held(w), -w.age, w.id), default=None)
    return holder if holder is not None and held(holder) > newest(stay) else None


# --------------------------------------------------------------------------------------------------- commits of shards
# The copies of the shards of a commit, in the buffers of slots and in the copy stores of hosts: see sharded.py.


Copies = dict[t.CommitId, dict[int, list[t.CopyOf]]]
"""Copies by commit and digest."""


def reachable(m: Draft | Membership) -> list[Host]:
    """Return the hosts that the driver reaches."""
    return [host for host in m.hosts.values() if host.agent == "joined"]


def newest_whole(
    m: Draft | Membership, copies: Copies, beyond: Set[str] = frozenset()
) -> tuple[t.CommitId, tuple[t.ShardSource, ...]] | None:
    """Return the newest commit with a copy for each digest of its layout, and these copies. Those on the hosts
    ``beyond`` do not count."""
    layouts = {layout.generation: layout for layout in m.shards.layouts}
    for commit in sorted(copies, reverse=True):
        needed = dict.fromkeys(digest for _, digest in layouts[commit.generation].digests)
        found = copies[commit]
        if beyond:
            near = {digest: [copy for copy in its if copy.host not in beyond] for digest, its in found.items()}
            found = {digest: its for digest, its in near.items() if its}
        if len(found) == len(needed):
            return commit, tuple(t.ShardSource(digest, copy) for digest in needed for copy in found[digest])
    return None


def copies_on(m: Draft | Membership, hosts: Sequence[Host]) -> Copies:
    """Return the copies on these hosts: those in a slot's own buffer before the kept ones."""
    digests = {
        (layout.generation, slot_id): digest for layout in m.shards.layouts for slot_id, digest in layout.digests
    }
    found: Copies = {}
    kept = ((host.name, slot_id, commit) for host in hosts for slot_id, commit in sorted(host.kept))
    in_stores = (copy for copy in kept if not is_rejected(m, copy[2]))
    for host, slot_id, commit in (*_in_buffers(m, hosts), *in_stores):
        digest = digests.get((commit.generation, slot_id))
        if digest is not None:
            found.setdefault(commit, {}).setdefault(digest, []).append(t.CopyOf(host, slot_id, commit))
    return found


def _in_buffers(m: Draft | Membership, hosts: Sequence[Host]) -> Iterator[tuple[str, t.SlotId, t.CommitId]]:
    for host in hosts:
        for index in range(host.slots_ever):
            slot_id = t.SlotId(host.name, index)
            slot = m.slots.get(slot_id)
            for commit in (slot.retained, slot.previous) if slot is not None else ():
                if commit is not None:
                    yield host.name, slot_id, commit


# ---------------------------------------------------------------------------------------------------------- uncommitted
# Work that no commit holds: a warning before it is lost, and its amount when it is.
#
# Whoever has forgotten ``commit()`` would learn that from the first failure only. So the core warns, once in a job. A
# call whose tick is not saved (``commit(every=N)``) counts, because commits will come. A world without any tick has a
# notice of its own (health.py). In long ticks a failure loses much that no number of ticks says.


_MANY = 100  # ticks
_AT_LEAST_S = 5.0  # less work than this is no loss to warn of
_FEW = 5  # ticks that a world has completed at least before time alone decides
_LONG_S = 1.0  # from which the part of a tick that a failure has cut off is told
_INACCURACY_S = 1.0  # of the time of the last tick, if no survivor reports it


def check_commits(d: Draft, phase: Running, members: Sequence[Worker]) -> None:
    """Warn if the job trains and commits nothing."""
    ledger = d.ledger
    if ledger.commits_come or ledger.commit_warned or not phase.first_tick:
        return
    ticks, seconds = ledger.ticking.completed, ledger.ticking.at - phase.since
    is_much = ticks > _MANY and seconds >= _AT_LEAST_S
    is_long = ticks >= _FEW and seconds >= d.policy.no_tick_notice_s
    if not is_much and not is_long:
        return
    if any(w.commit is not None and w.commit.generation == d.generation and w.commit.tick for w in members):
        d.update_ledger(commits_come=True)
        return
    d.update_ledger(commit_warned=True)
    d.warn(
        f"nothing was committed in the first {number_of(ticks, 'tick')} ({seconds:.0f} s) of generation "
        f"{d.generation}: a failure may lose them all. Call state.commit() in the training loop; commit(every=N) saves "
        f"at each N-th tick"
    )


def lost_with_nothing_committed_s(d: Draft) -> float:
    """Return the seconds that the present generation has trained, if the job has never committed: its end loses them.

    Warn if the job has no ticks, so that no event will say that training has resumed.
    """
    if d.ledger.highest is not None or d.ledger.durable is not None:
        return 0.0
    present = d.ledger.account.until(d.now).present
    seconds = present.goodput + present.commit_stall + present.redone_ticks + present.no_ticks
    if not d.ledger.has_ticked and round(seconds, 1):
        d.warn(
            f"generation {d.generation + 1} begins from scratch: generation {d.generation} made no tick and no commit, "
            f"so all of its work ({seconds:.1f} s, an unknown number of steps) is lost. Call state.commit() in the "
            f"training loop"
        )
    return seconds


def lost_in_an_unfinished_tick_s(d: Draft, completed: int) -> float:
    """Return the seconds that the present generation has trained since its last tick, if the job has committed and they
    are not few: its end loses them.

    ``completed``: ticks of the generation. After some, the lost part of a tick is small, or the failure was found late.
    """
    if completed > 1 or (d.ledger.highest is None and d.ledger.durable is None):
        return 0.0
    account, ticking = d.ledger.account.until(d.now), d.ledger.ticking
    seconds, cut = account.present.no_ticks, account.cut
    least = _LONG_S
    if cut is not None and cut.is_proven:
        seconds += max(0.0, cut.unproven_s - cut.gap_s)
    elif cut is not None:
        seconds += max(0.0, cut.at - ticking.at - cut.gap_s)
        least += _INACCURACY_S
    return seconds if seconds >= least else 0.0
