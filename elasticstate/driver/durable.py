"""DurableCopies: decides when a durable copy of the job's state is saved, and by which agents.

One copy at a time. If several agents save parts of it, one of them completes the copy when all parts are saved; the
failure of one part is the failure of the copy. At the end of the job the memory with its last commit is kept until that
is saved, at most for ``--driver-timeout``. See docs/decisions/durable-copies.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil

from elasticstate.core import event_file
from elasticstate.core.commits import newest_equal
from elasticstate.core.ids import CommitId, SlotId
from elasticstate.core.sharded import find_line, is_sharded
from elasticstate.core.state import Membership, Over, Running, living_members
from elasticstate.core.types import CopyOf, ShardLayout, ShardSource, listed
from elasticstate.driver.job import JobState
from elasticstate.driver.report import Journal
from elasticstate.durable.stored_copies import HOST, LOST, MISSED, NOT_FAILED, TORN, UNCHANGED, copy_name
from elasticstate.net import messages
from elasticstate.options import Options

# --------------------------------------------------------------------------------------------------------- durable plan
# Plan of a durable copy: which agent saves which commits. A replicated state is one part: the newest commit of the
# root. A sharded state has a part for each shard digest, all of one commit: if workers commit rarely, of the one that
# all have sealed; else of the first from an id that is still to come.


_RARELY_S = 10.0  # between two commits
_PACE_S = 1.0


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Parts of a copy, by the host that saves them."""

    parts: dict[str, tuple[messages.DurablePart, ...]]
    total: int
    first: CommitId | None = None  # the first commit from this one on is saved; None: the newest one


class Pace:
    """Recent ticks per second of the present world."""

    def __init__(self) -> None:
        self._since = (0, 0.0, 0)  # generation, time, ticks
        self.ticks_per_s = 0.0

    def look(self, m: Membership, now: float) -> None:
        """Measure. Call it several times per second."""
        ticks = max((worker.ticks for worker in living_members(m)), default=0)
        generation, at, before = self._since
        if generation != m.generation:
            self._since, self.ticks_per_s = (m.generation, now, ticks), 0.0
        elif now - at >= _PACE_S:
            self._since, self.ticks_per_s = (m.generation, now, ticks), (ticks - before) / (now - at)


def plan_copy(m: Membership, ticks_per_s: float, now: float, lead_s: float, saved: CommitId | None) -> CopyPlan | None:
    """Return the plan of a copy of the running job; None if there is nothing to save now.

    ``lead_s``: time for the orders to arrive. ``saved``: the commit in the last copy of this job.
    """
    if not isinstance(m.phase, Running) or m.ledger.highest is None:
        return None
    if not is_sharded(m):
        return _plan_of_equal(m) if m.policy.divergence == "restore" else _plan_of_one(_source(m))
    layout = m.shards.layouts[-1]
    if layout.generation != m.generation or m.world is None or len(living_members(m)) < m.world.size:
        return None  # the world attaches its values, or ends
    line = m.shards.line
    if line is None or line.generation != m.generation:
        return None
    if m.policy.divergence == "restore":
        line = CommitId(m.generation, newest_equal(m)) if m.world.size > 1 else line
        return _plan_of_shards(_holders(m, layout, line), line) if line != saved else None
    every_s = _seconds_between_commits(m, layout, line, ticks_per_s, now)
    if every_s is None:
        return None
    if every_s >= _RARELY_S:
        return _plan_of_shards(_holders(m, layout, line), line) if line != saved else None
    member = max(living_members(m), key=lambda worker: worker.ticks)
    lead = ceil(ticks_per_s * (now - member.ticks_at + lead_s))
    to_come = CommitId(m.generation, member.ticks + 1 + lead)
    return _plan_of_shards(_in_slots(layout, to_come), to_come)


def plan_last(m: Membership) -> CopyPlan | None:
    """Return the plan of the last copy, of a job that makes no more commits."""
    if m.ledger.highest is None:
        return None
    if is_sharded(m):
        found = find_line(m)
        return _plan_of_shards(list(found[1]), found[0]) if found is not None else None
    if m.policy.divergence == "restore" and not isinstance(m.phase, Over):
        return _plan_of_equal(m)
    return _plan_of_one(_newest_retained(m) if isinstance(m.phase, Over) else _source(m))


def _plan_of_one(slot: SlotId | None, commit: CommitId | None = None) -> CopyPlan | None:
    return CopyPlan({slot.host: (messages.DurablePart(slot, 1, 0),)}, 1, commit) if slot is not None else None


def _plan_of_equal(m: Membership) -> CopyPlan | None:
    """Return the plan of a copy of the newest commit that is equal on all members: a newer one may be rejected."""
    if m.world is None or m.world.size == 1:
        return _plan_of_one(_source(m))
    commit = CommitId(m.generation, newest_equal(m))
    for worker in living_members(m) if commit.tick else ():
        if commit in dict(m.slots[worker.id.slot_id].digests):
            return _plan_of_one(worker.id.slot_id, commit)
    return None


def _plan_of_shards(sources: list[ShardSource], first: CommitId) -> CopyPlan | None:
    """Return a plan in which each digest is saved once, each by the host that saves least so far."""
    copies: dict[int, list[CopyOf]] = {}
    for source in sources:
        copies.setdefault(source.digest, []).append(source.copy)
    load: Counter[str] = Counter()
    parts: dict[str, list[messages.DurablePart]] = {}
    for number, (digest, same) in enumerate(copies.items(), start=1):
        copy = min(same, key=lambda copy: load[copy.host])
        load[copy.host] += 1
        parts.setdefault(copy.host, []).append(messages.DurablePart(copy.slot, number, digest))
    return CopyPlan({host: tuple(found) for host, found in parts.items()}, len(copies), first) if parts else None


def _seconds_between_commits(
    m: Membership, layout: ShardLayout, line: CommitId, ticks_per_s: float, now: float
) -> float | None:
    """Return the time between two commits, as far as it is known; None: it will be known soon."""
    slot = m.slots[layout.digests[0][0]]
    newest = slot.retained if slot.retained is not None and slot.retained >= line else line
    age_s = now - m.shards.line_at
    if not newest.tick or not ticks_per_s:
        return age_s if age_s >= _RARELY_S else None
    before = slot.previous.tick if slot.previous is not None and slot.previous.generation == m.generation else 0
    return max((newest.tick - before) / ticks_per_s, age_s)


def _in_slots(layout: ShardLayout, commit: CommitId) -> list[ShardSource]:
    return [ShardSource(digest, CopyOf(slot_id.host, slot_id, commit)) for slot_id, digest in layout.digests]


def _holders(m: Membership, layout: ShardLayout, commit: CommitId) -> list[ShardSource]:
    """Return the copies of a commit that all members have sealed: in their buffers, and kept ones."""
    digests = dict(layout.digests)
    kept = [
        ShardSource(digests[slot_id], CopyOf(host.name, slot_id, commit))
        for host in m.hosts.values()
        for slot_id, of in sorted(host.kept)
        if host.agent == "joined" and of == commit and slot_id in digests
    ]
    return [*_in_slots(layout, commit), *kept]


def _source(m: Membership) -> SlotId | None:
    """Return the slot whose commit is saved: the root's if it lives."""
    if m.world is None:
        return None
    for placement in (m.world.members[m.world.root], *m.world.members):
        worker = m.workers.get(placement.worker)
        if worker is not None and worker.commit is not None and not worker.gone and worker.joined == m.generation:
            return worker.id.slot_id
    return None


def _newest_retained(m: Membership) -> SlotId | None:
    """Return the slot with the newest commit in memory, after the end of all workers."""
    held = [
        (slot.retained, slot_id)
        for slot_id, slot in m.slots.items()
        if slot.retained is not None and m.hosts[slot_id.host].agent == "joined"
    ]
    return max(held, key=lambda item: item[0])[1] if held else None


_LOOK_INTERVAL_S = 0.25
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_LEAD_S = 0.5  # for orders to arrive before a commit to come
_LONGEST_LEAD_S = 8.0
_LAST_ATTEMPTS = 4  # in a row that came too late for the last commit of the job
_LAST_RETRY_S = 0.2
_LATE, _LATE_S = "late", 60.0


@dataclass(slots=True)
class _Attempt:
    """A copy in progress."""

    folder: str
    hosts: set[str]  # whose agents have not answered yet
    total: int  # parts
    is_one_order: bool  # one agent has all parts, or all parts are saved: its answer ends the copy
    commits: set[CommitId] = field(default_factory=set)  # in the parts that are saved


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt has saved nothing. ``kind``: see durable/stored_copies.py."""

    kind: str
    reason: str


@dataclass(slots=True)
class _Schedule:
    """Time of the next copy, and the failures before it."""

    due_at: float
    failures: int = 0  # in a row
    warned: set[str] = field(default_factory=set)  # kinds of these failures, and _LATE
    first_due_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.first_due_at = self.due_at


class DurableCopies:
    """Durable copies of a job. ``send`` sends a message to the agent of a host, and returns False if that is lost."""

    def __init__(
        self, options: Options, state: JobState, journal: Journal, send: Callable[[str, messages.ToAgent], bool]
    ) -> None:
        self._options = options
        self._state = state
        self._journal = journal
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._schedule = _Schedule(self._loop.time() + options.durable_interval_s)
        self._attempt: _Attempt | None = None
        self._failure: _Failure | None = None  # of the last attempt
        self._began_at = 0.0  # of the attempt
        self._last_name = 0  # milliseconds in the name of the last copy
        self._earlier: tuple[str, ...] = ()  # name of the newest copy that is complete
        self._pace = Pace()
        self._answered = asyncio.Event()  # no order waits for an answer
        self._answered.set()

    async def run(self) -> None:
        """Order copies until cancelled."""
        while self._options.durable_dir is not None:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            self._pace.look(self._state.membership, self._loop.time())
            self._warn_if_late()
            if self._attempt is None and self._loop.time() >= self._schedule.due_at:
                plan = self._plan()
                if plan is not None:
                    self._order(plan)

    def _warn_if_late(self) -> None:
        """Warn once, whatever the cause is, if a copy of the newest commit is long overdue."""
        schedule, figures, attempt = self._schedule, self._state.durable, self._attempt
        late_s = self._loop.time() - schedule.first_due_at
        if self._last_commit is None or _LATE in schedule.warned:
            return
        if figures.newest is not None and figures.newest >= self._last_commit:
            return
        if late_s < max(_LATE_S, self._options.durable_interval_s):
            return
        schedule.warned.add(_LATE)
        if attempt is not None:
            seconds = self._loop.time() - self._began_at
            hosts = f"{'host' if len(attempt.hosts) == 1 else 'hosts'} {listed(sorted(attempt.hosts))}"
            reason = f"{hosts} began to save {attempt.folder} {seconds:.0f} s ago"
        elif figures.trouble:
            reason = figures.trouble
        else:
            reason = (
                "no commit can be saved" if isinstance(self._state.membership.phase, Running) else "no world trains"
            )
        self._warn(f"the copy that was due {late_s:.0f} s ago is not saved: {reason}. {self._newest_text}")

    def _plan(self, missed: int = 0) -> CopyPlan | None:
        lead_s = min(_LONGEST_LEAD_S, _LEAD_S * 2.0 ** (self._schedule.failures + missed))
        figures, ticks_per_s = self._state.durable, self._pace.ticks_per_s
        return plan_copy(self._state.membership, ticks_per_s, self._loop.time(), lead_s, figures.newest)

    async def finish(self, hurry: asyncio.Event) -> None:
        """Save the last commit of the job. While that fails, try again for ``--driver-timeout``. Say what is not saved.

        ``hurry``: give up when it is set.
        """
        if self._options.durable_dir is None or self._state.membership.ledger.highest is None:
            return
        await self._answered_or(hurry)
        if reason := await self._save_last(hurry):
            self._state.durable.unsaved = self._last_commit
            self._warn(f"{self._last_commit_text} is not saved: {reason}. {self._newest_text}")

    async def _save_last(self, hurry: asyncio.Event) -> str:
        """Save the last commit. Return why it is not saved, or ""."""
        give_up_at, missed, reason = 0.0, 0, ""
        while not hurry.is_set():
            plan = self._plan(missed) or plan_last(self._state.membership)  # after a signal, the workers still train
            if plan is None:
                return self._unless_saved(reason or "no host holds it any more")
            self._order(plan)
            await self._answered_or(hurry)
            if self._attempt is not None:
                break
            if self._failure is None or self._failure.kind == UNCHANGED:
                return ""
            kind, reason = self._failure.kind, self._failure.reason
            missed = missed + 1 if kind in MISSED else 0  # no later commit would make up for it
            pause_s = _LAST_RETRY_S if missed else max(_LAST_RETRY_S, self._schedule.due_at - self._loop.time())
            if missed == _LAST_ATTEMPTS or (give_up_at and self._loop.time() + pause_s > give_up_at):
                return reason
            if not missed and not give_up_at:
                timeout_s = self._options.driver_timeout_s
                give_up_at = self._loop.time() + timeout_s
                self._warn(
                    f"{self._last_commit_text} is not saved yet: {reason}. Its memory is kept, and it is tried again, "
                    f"for --driver-timeout of {timeout_s:g} s. A signal ends that"
                )
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(hurry.wait(), pause_s)
        return self._unless_saved(f"{reason or 'it took long'}, and a signal has ended the attempts")

    def _unless_saved(self, reason: str) -> str:
        return "" if self._state.durable.newest == self._last_commit else reason

    @property
    def _last_commit(self) -> CommitId | None:
        return self._state.membership.ledger.highest

    @property
    def _last_commit_text(self) -> str:
        return f"the last commit of the job, {self._last_commit},"

    @property
    def _newest_text(self) -> str:
        figures = self._state.durable
        age_s = figures.age_s(self._loop.time())
        if age_s is None:
            return "This driver has saved no copy: a job that resumes begins from an older one, if there is one"
        return (
            f"The newest copy, {self._earlier[0]}, is {age_s:.0f} s old and has commit {figures.newest}: a job that "
            "resumes begins there"
        )

    def _warn(self, text: str) -> None:
        self._journal.warn(f"--durable-dir {self._options.durable_dir}: {text}")

    async def _answered_or(self, hurry: asyncio.Event) -> None:
        """Wait until the agent has answered, or is lost."""
        events = [asyncio.ensure_future(event.wait()) for event in (self._answered, hurry)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    def _order(self, plan: CopyPlan) -> None:
        self._last_name = max(time.time_ns() // 1_000_000, self._last_name + 1)
        self._began_at = self._loop.time()
        folder = copy_name(self._last_name)
        self._attempt = _Attempt(folder, set(plan.parts), plan.total, is_one_order=len(plan.parts) == 1)
        self._failure = None
        self._answered.clear()
        saved = self._state.durable.newest
        lost = []
        for host, parts in plan.parts.items():
            order = messages.SaveDurable(folder, parts, plan.total, self._world_size, plan.first, self._earlier, saved)
            if not self._send(host, order):
                lost.append(host)
        for host in lost:  # the plan named them because the core has not heard of their loss yet
            self.host_lost(host)

    @property
    def _world_size(self) -> int:
        world = self._state.membership.world
        return world.size if world is not None else 0

    # -------------------------------------------------------------------------------------------------------- answers

    def saved(self, host: str, message: messages.DurableSaved) -> bool:
        """Handle the success of an order. Return True if the copy is complete, False if only parts of it are saved."""
        attempt = self._answered_by(host, message.folder)
        if attempt is None:
            return False
        attempt.commits.add(message.commit)
        if len(attempt.commits) > 1:
            commits = ", ".join(map(str, sorted(attempt.commits)))
            reason = f"its parts are of different commits: {commits}"
            self._end_attempt(attempt, _Failure(TORN, reason))
            self._failed(host, message.folder, TORN, reason)
        elif attempt.is_one_order:
            self._end_attempt(attempt)
            self._complete(host, message)
            return True
        elif not attempt.hosts:
            attempt.hosts, attempt.is_one_order = {host}, True
            order = (attempt.folder, message.commit, attempt.total, self._world_size, self._earlier)
            if not self._send(host, messages.CompleteDurable(*order)):
                self.host_lost(host)
        return False

    def _complete(self, host: str, message: messages.DurableSaved) -> None:
        figures = self._state.durable
        figures.saved += 1
        figures.newest, figures.newest_at, figures.newest_bytes = message.commit, self._began_at, message.bytes
        figures.trouble = ""
        self._journal.event(
            event_file.DurableCopy,
            state="saved",
            host=host,
            folder=message.folder,
            commit=list(message.commit),
            bytes=message.bytes,
            seconds=self._loop.time() - self._began_at,
            failures=self._schedule.failures,
        )
        self._schedule = _Schedule(max(self._loop.time(), self._began_at + self._options.durable_interval_s))
        self._earlier = (message.folder,)
        if message.lost:
            figures.failed += 1
            self._report(LOST, f"the storage has lost an earlier copy: {message.lost}", host, message.folder)
        if message.warning:
            self._journal.agent_warning(host, f"--durable-dir: {message.warning}")

    def failed(self, host: str, message: messages.DurableFailed) -> None:
        """Handle the failure of an attempt: try again later."""
        attempt = self._answered_by(host, message.folder)
        if attempt is None:
            return
        self._end_attempt(attempt, _Failure(message.kind, message.reason))
        if message.kind in NOT_FAILED:
            self._schedule.due_at = self._loop.time() + min(_FIRST_RETRY_S, self._options.durable_interval_s)
        else:
            self._failed(host, message.folder, message.kind, message.reason)

    def host_lost(self, host: str) -> None:
        """Handle the loss of an agent, which may have an order."""
        attempt = self._attempt
        if attempt is not None and host in attempt.hosts:
            attempt.hosts.remove(host)
            reason = "the agent was lost while it saved the copy"
            self._end_attempt(attempt, _Failure(HOST, reason))
            self._failed(host, attempt.folder, HOST, reason)

    def _answered_by(self, host: str, folder: str) -> _Attempt | None:
        """Return the attempt to which the answer of a host belongs; None: to an older one."""
        attempt = self._attempt
        if attempt is None or attempt.folder != folder or host not in attempt.hosts:
            return None
        attempt.hosts.remove(host)
        return attempt

    def _end_attempt(self, attempt: _Attempt, failure: _Failure | None = None) -> None:
        """End an attempt. Agents that still save parts of it are to stop."""
        for host in sorted(attempt.hosts):
            self._send(host, messages.DropDurable(attempt.folder))
        self._attempt, self._failure = None, failure
        self._answered.set()

    def _failed(self, host: str, folder: str, kind: str, reason: str) -> None:
        schedule, figures = self._schedule, self._state.durable
        schedule.failures += 1
        figures.failed += 1
        figures.trouble = reason
        retry_s = min(_FIRST_RETRY_S * 2 ** (schedule.failures - 1), _LONGEST_RETRY_S, self._options.durable_interval_s)
        schedule.due_at = self._loop.time() + retry_s
        self._report(kind, f"a durable copy could not be saved: {reason}; next attempt in {retry_s:g} s", host, folder)

    def _report(self, kind: str, text: str, host: str, folder: str) -> None:
        """Write the event, and a warning for the first failure of its kind since the last success."""
        figures = self._state.durable
        self._journal.event(
            event_file.DurableCopy,
            state="failed",
            host=host,
            folder=folder,
            kind=kind,
            reason=text,
            failures=figures.failed,
        )
        if kind not in self._schedule.warned:
            self._schedule.warned.add(kind)
            self._warn(f"host {host}: {text}")
