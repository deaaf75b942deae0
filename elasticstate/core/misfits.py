"""Misfits: new processes that cannot load the state of the job, because the training has changed its structure.

A new process on a host of the world finds this out before its first READY, so nobody stops for it; its slot is
restarted with the usual backoff. On another host, it finds out in its first world. The others stop for it once:
afterwards, no worker is started in the slots of that host that have no member.

The job ends with the reason if new processes are all that is left: if no member lives and no slot that holds the newest
commit can load it (an older commit would be a loss that nobody has asked for), or if too few members live.
"""

from __future__ import annotations

from elasticstate.core import types as t
from elasticstate.core.cooldown import FAILURES_IN_A_ROW
from elasticstate.core.ending import earlier
from elasticstate.core.records import NEW_SLOT, Draft, Worker
from elasticstate.core.retained import has_job_state
from elasticstate.core.slots import stop
from elasticstate.core.texts import listed

_ERROR = "StateMisfitError"  # in the traceback of such a worker: see errors.py


def worker_failed(d: Draft, worker: Worker, cause: t.RootCause) -> None:
    """Record whether a worker has failed because it could not load the state of the job."""
    is_new = not worker.joined or (worker.lacked and worker.joined == worker.first_joined)
    is_misfit = is_new and bool(cause.exit_code) and _ERROR in cause.error
    slot_id = worker.id.slot_id
    if is_misfit or d.slots[slot_id].misfit is not None:
        d.put_slot(slot_id, misfit=cause if is_misfit else None)
    if is_misfit and worker.joined and d.ledger.highest is not None:  # else all have the same structure from the start
        _bar(d, worker.id.host, cause)


def _bar(d: Draft, host: str, cause: t.RootCause) -> None:
    """Start no more workers in the slots of a host that have no member, and stop those that were in no world yet."""
    barred = []
    for index in range(d.hosts[host].slots_ever):
        slot_id = t.SlotId(host, index)
        slot = d.slots.get(slot_id, NEW_SLOT)
        worker = d.workers.get(slot.worker) if slot.worker is not None else None
        if worker is None or not worker.joined:
            d.put_slot(slot_id, barred=True)
            barred.append(slot_id)
        if worker is not None and not worker.joined and not worker.gone:
            stop(d, worker, "it could not load the state of the job")
    slots = "slot" if len(barred) == 1 else "slots"
    d.warn(
        f"{slots} {listed(map(str, barred))}: no worker is started there any more, because a new one could not load "
        f"the state of the job: {_last_line(cause)}"
    )


def of_newest_commit(d: Draft) -> t.RootCause | None:
    """Return why the newest commit cannot be loaded by any new process; None if it can, or if that is not known."""
    if all(slot.misfit is None for slot in d.slots.values()) or any(has_job_state(d, w) for w in d.workers.values()):
        return None
    newest = max((slot.retained for slot in d.slots.values() if slot.retained is not None), default=None)
    if newest is None:
        return None
    holders = [slot for slot in d.slots.values() if slot.retained == newest]
    ready = [worker.ready.commit for worker in d.workers.values() if worker.ready is not None and not worker.gone]
    if any(commit is not None and commit >= newest for commit in ready):
        return None
    found: t.RootCause | None = None
    for slot in holders:
        if slot.misfit is None:
            return None
        found = earlier(found, slot.misfit)
    return found


def of_all_free_slots(d: Draft) -> t.RootCause | None:
    """Return why no free slot can help a job with too few workers: new processes in all of them could not load its
    state, repeatedly. None if that is not so."""
    free = [slot for slot in d.slots.values() if slot.worker is None and not slot.finished]
    found: t.RootCause | None = None
    for slot in free:
        if not slot.barred and (slot.misfit is None or slot.failures < FAILURES_IN_A_ROW):
            return None
        found = earlier(found, slot.misfit) if slot.misfit is not None else found
    return None if d.booting else found


def _last_line(cause: t.RootCause) -> str:
    lines = [line for line in cause.error.splitlines() if _ERROR in line]
    return lines[-1].strip() if lines else cause.reason
