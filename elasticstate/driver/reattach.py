"""Reattach: a new driver continues a job whose driver has died, from the job's record and the agents' host reports.

The record on disk has the hosts to wait for, and the newest world. All else comes from the agents.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterable

import msgspec

from elasticstate.core import types as t
from elasticstate.core.figures import PastFigures
from elasticstate.core.reattach import Remains
from elasticstate.core.state import Membership, by_discovery
from elasticstate.driver.record import JobDirectory, Record
from elasticstate.errors import OptionError
from elasticstate.net import messages
from elasticstate.net.names import learn_full_name
from elasticstate.net.trust import token_of_job
from elasticstate.options import Options
from elasticstate.threads import in_thread, next_beat
from elasticstate.writing import BLOCKED_S


def lock_job(job: str) -> JobDirectory:
    """Lock the job's name, and find out which hosts of the previous driver are this machine. May block.

    Raises OptionError.
    """
    directory = JobDirectory(job)
    if directory.found is not None:
        learn_full_name(directory.found.agents)
    return directory


_LOOK_INTERVAL_S = 1.0


def first_record(options: Options, job: str) -> Record:
    """Return the record of a new job. Raises OptionError."""
    token = token_of_job(options.token_file)
    return Record(job, secrets.token_hex(8), 1, token, (), options, os.getcwd())


def next_record(last: Record, options: Options, job: str) -> Record:
    """Return the record of a driver that reattaches. Raises OptionError if it runs another command."""
    if options.command != last.options.command:
        raise OptionError(
            f"--job-name: {job!r}: a job of this name lost its driver, and it runs another command, "
            f"{shlex.join(last.options.command)}. Choose another name, or end that job with elasticrun --reattach "
            f"{job} and Ctrl-C."
        )
    return msgspec.structs.replace(last, epoch=last.epoch + 1, options=options)


def lost_hosts(events: Iterable[t.Event]) -> list[str]:
    """Return the hosts that events report as lost."""
    return sorted({event.host for event in events if isinstance(event, t.AgentLost)})


def newer(old: Record, m: Membership, ports: tuple[int, ...], clocks: tuple[float, float]) -> Record | None:
    """Return the record for the current state; None if it has not changed.

    ``clocks``: the core's clock, and Unix time. The next driver must know them, because it may have another clock.
    """
    agents = tuple(sorted(host.name for host in m.hosts.values() if host.agent == "joined"))
    hosts = tuple(t.HostSlots(host.name, host.slots, host.rack) for host in by_discovery(m) if host.slots)
    is_first_commit = old.highest is None and m.ledger.highest is not None
    is_same_world = m.world is old.world
    first_round = _first_round(m)
    past = PastFigures(m.ledger.account.until(clocks[0]), m.ledger.failures, m.ledger.total + m.ledger.losses)
    figures = (past.account.activity, past.failures, past.losses)
    old_figures = (old.past.account.activity, old.past.failures, old.past.losses)
    now = (ports, agents, hosts, first_round, m.ledger.restarts, figures, m.shards.layouts, m.shards.replicated)
    old_shards = (old.layouts, old.replicated)
    before = (old.ports, old.agents, old.hosts, old.first_round, old.restarts, old_figures, *old_shards)
    if is_same_world and not is_first_commit and now == before:
        return None
    members = m.world.members if m.world is not None else ()
    ages = old.ages if is_same_world else tuple(_age(m, placement.worker) for placement in members)
    return msgspec.structs.replace(
        old,
        ports=ports,
        agents=agents,
        hosts=hosts,
        world=m.world,
        ages=ages,
        next_age=m.ledger.next_age,
        highest=m.ledger.highest,
        first_round=first_round,
        restarts=m.ledger.restarts,
        layouts=m.shards.layouts,
        replicated=m.shards.replicated,
        past=past,
        clocks=clocks,
    )


def _has_only_new_figures(old: Record, new: Record) -> bool:
    """Return True if an old record serves as well: with older figures, and an older commit than the newest."""
    highest = old.highest or new.highest
    return msgspec.structs.replace(new, past=old.past, clocks=old.clocks, highest=highest) == old


def _first_round(m: Membership) -> tuple[t.Placement, ...]:
    """Return the members of a round of which it is not known if they use ``run``: they have no world."""
    present = m.ledger.round
    return () if present is None or present.end or m.ledger.kind else present.members


def _age(m: Membership, worker: t.WorkerId) -> int:
    """Return the age of a member; 0 for one that has ended already (of a plain world, where ages have no meaning)."""
    return m.workers[worker].age if worker in m.workers else 0


class Keeper:
    """Keeps the record of a job. Await ``keep`` after each step of the core, before its effects are carried out."""

    def __init__(self, directory: JobDirectory, record: Record, warn: Callable[[str], None]) -> None:
        self.record = record
        self._directory = directory
        self._warn = warn
        self._is_written = True
        self._writing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._note(self._write(record))

    def watch(self) -> None:
        """Start to check the directory regularly: if it is deleted, restore it with the record."""
        self._watching = asyncio.ensure_future(self._look_regularly())

    async def _look_regularly(self) -> None:
        while True:
            await next_beat(_LOOK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Restore the directory with the record, if it was deleted. Give a sign of life for the next driver."""
        async with self._writing:
            await self._mend()
            await in_thread(self._directory.sign_of_life)

    async def _mend(self) -> None:
        if not await in_thread(lambda: self._directory.is_lost):
            return
        what = f"{self._directory.path}, the directory with the record of this job, was deleted"
        try:
            await in_thread(self._directory.make_anew, self.record)
        except OSError as error:
            if self._is_written:
                self._warn(
                    f"{what} and could not be created again ({error}): elasticrun status and --reattach do not find "
                    "the job. systemd-logind deletes XDG_RUNTIME_DIR at the end of a user's last session. Prevent this "
                    "with loginctl enable-linger"
                )
            self._is_written = False
        else:
            self._is_written = True
            self._warn(f"{what} and created again")

    async def keep(self, m: Membership, ports: tuple[int, ...], now: float) -> None:
        """Write the record if it has changed. A file system that hangs delays effects, but not the event loop."""
        async with self._writing:
            record = newer(self.record, m, ports, (now, time.time()))
            may_stay = self._is_written and record is not None and _has_only_new_figures(self.record, record)
            if record is not None:
                self.record = record
            if record is not None or not self._is_written:
                late = asyncio.get_running_loop().call_later(BLOCKED_S, self._warn, self._delay_text())
                self._note(await in_thread(self._write, self.record, may_stay))
                late.cancel()

    async def job_is_over(self) -> None:
        """Mark the job as over in the record. Call this before the first commit is removed."""
        async with self._writing:  # the watch must not write an older record now
            if self._watching is not None:
                self._watching.cancel()
            self.record = msgspec.structs.replace(self.record, is_over=True)
            self._note(await in_thread(self._write, self.record))

    def _write(self, record: Record, may_stay: bool = False) -> str:
        """Write the record. Return why that failed, or "".

        After a failure the record is removed: with an old one the next driver would reuse numbers of generations.
        ``may_stay``: the old one stays instead, because only its figures are old.
        """
        try:
            self._directory.write(record)
        except OSError as error:
            if may_stay:
                return ""
            self._directory.forget()
            return error.strerror or str(error)
        return ""

    def _note(self, failure: str) -> None:
        if failure and self._is_written:
            self._warn(
                f"{self._directory.path} could not be written ({failure}); until then no new driver can reattach"
            )
        self._is_written = not failure

    def _delay_text(self) -> str:
        return (
            f"{self._directory.path} is not written after {BLOCKED_S:g} s; decisions of the driver wait for the record"
        )


class Reattachment:
    """The agents of the previous driver, as they reconnect. ``seen_at``: Unix time of its last sign of life."""

    def __init__(self, record: Record, seen_at: float) -> None:
        self.record = record
        self._seen_at = seen_at
        self.is_over = False
        self._reports: dict[str, messages.HostReport] = {}

    def joined(self, host: str, host_report: messages.HostReport) -> None:
        self._reports[host] = host_report

    def awaited(self, lost: Iterable[str]) -> list[str]:
        """Return the hosts whose agents have neither reconnected nor are ``lost``."""
        return sorted(set(self.record.agents).difference(self._reports, lost))

    def back(self) -> list[str]:
        """Return the hosts whose agents have reconnected."""
        return sorted(self._reports)

    def lost(self) -> list[str]:
        """Return the hosts without a connected agent that had one, or have members of the newest world."""
        world = self.record.world
        members = {placement.worker.host for placement in world.members} if world is not None else set()
        return sorted(members.union(self.record.agents).difference(self._reports))

    def remains(self, clocks: tuple[float, float]) -> Remains:
        """Return all facts about the job, for the core. ``clocks``: the core's clock, and Unix time."""
        now, unix = clocks
        record, world = self.record, self.record.world
        reports = [report for host_report in self._reports.values() for report in host_report.workers]
        generation = world.generation if world is not None else 0
        stamps = [report.stamp for report in reports if report.generation == generation]
        members = {placement.worker for placement in world.members} if world is not None else None
        exited = {exited.worker for host_report in self._reports.values() for exited in host_report.exits}
        named = {host.name for host in record.hosts}
        return Remains(
            epoch=record.epoch,
            world=world,
            ages=record.ages,
            next_age=record.next_age,
            highest=record.highest,
            first_round=record.first_round,
            restarts=record.restarts,
            layouts=record.layouts,
            replicated=record.replicated,
            past=record.past.shifted(now - max(0.0, unix - record.clocks[1]) - record.clocks[0]),
            seen_at=now - max(0.0, unix - max(self._seen_at, record.clocks[1])),
            hosts=(*record.hosts, *(t.HostSlots(host, 0) for host in self.back() if host not in named)),
            lost=frozenset(self.lost()),
            living={report.worker: report.generation for report in reports},
            exited=frozenset(exited if members is None else exited & members),
            ticks=max((stamp.ticks for stamp in stamps if stamp.generation == generation), default=0),
            has_ended=generation > 0 and any(host_report.ended >= generation for host_report in self._reports.values()),
            gate_is_open=generation > 0
            and any(host_report.gate == generation for host_report in self._reports.values()),
        )
