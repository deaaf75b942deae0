"""A driver goes on where one before it has died: what it must know of the agents that this one had, and how it is kept.

The record on disk says whom to wait for, and the newest world. All else is what the agents say.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Iterable

import msgspec

from elasticstate.config import Options
from elasticstate.core import types as t
from elasticstate.core.records import Membership, by_discovery
from elasticstate.core.takeover import Remains
from elasticstate.driver.record import JobDirectory, Record
from elasticstate.errors import OptionError
from elasticstate.net import messages
from elasticstate.net.trust import token_of_job


def first_record(options: Options, job: str) -> Record:
    """Of a new job. Raises OptionError."""
    token = token_of_job(options.token_file)
    return Record(job, secrets.token_hex(8), 1, token, (), options, os.getcwd())


def next_record(last: Record, options: Options, job: str) -> Record:
    """Of a driver that comes after another one. Raises OptionError when it is to run something else."""
    if options.command != last.options.command:
        raise OptionError(
            f"--job-name: {job!r}: takes the name of no other job: one that runs {shlex.join(last.options.command)} "
            f"has lost its driver: wait for --orphan-timeout, or end it by elasticrun --reattach {job} and Ctrl-C"
        )
    return msgspec.structs.replace(last, epoch=last.epoch + 1, options=options)


def lost_hosts(events: Iterable[t.Event]) -> list[str]:
    """Hosts that some of the events tell to be lost."""
    return sorted({event.host for event in events if isinstance(event, t.AgentLost)})


def newer(old: Record, m: Membership, ports: tuple[int, ...]) -> Record | None:
    """The record as it has to be from now on; None: as it was."""
    agents = tuple(sorted(host.name for host in m.hosts.values() if host.agent == "joined"))
    hosts = tuple(t.HostSlots(host.name, host.slots) for host in by_discovery(m) if host.slots)
    is_first_commit = old.highest is None and m.ledger.highest is not None
    is_same_world = m.world is old.world
    if is_same_world and not is_first_commit and (ports, agents, hosts) == (old.ports, old.agents, old.hosts):
        return None
    members = m.world.members if m.world is not None else ()
    ages = old.ages if is_same_world else tuple(m.workers[placement.worker].age for placement in members)
    return msgspec.structs.replace(
        old,
        ports=ports,
        agents=agents,
        hosts=hosts,
        world=m.world,
        ages=ages,
        next_age=m.ledger.next_age,
        highest=m.ledger.highest,
    )


class Keeper:
    """Keeps the record of a job: call ``keep`` before anything is done that follows from a step of the core."""

    def __init__(self, directory: JobDirectory, record: Record, warn: Callable[[str], None]) -> None:
        self.record = record
        self._directory = directory
        self._warn = warn
        self._is_written = True
        self._write()

    def keep(self, m: Membership, ports: tuple[int, ...]) -> None:
        """Write what has changed."""
        record = newer(self.record, m, ports)
        if record is not None:
            self.record = record
        if record is not None or not self._is_written:
            self._write()

    def _write(self) -> None:
        """An old record would be worse than none: the next driver would use generations again that there were."""
        try:
            self._directory.write(self.record)
            self._is_written = True
        except OSError as error:
            self._directory.forget()
            if self._is_written:
                self._warn(
                    f"{self._directory.path} cannot be written ({error.strerror}): no driver could take over now"
                )
            self._is_written = False


class Takeover:
    """The agents of the last driver, as they come back."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.is_over = False
        self._serving: dict[str, messages.Serving] = {}

    def joined(self, host: str, serving: messages.Serving) -> None:
        self._serving[host] = serving

    def awaited(self, lost: Iterable[str]) -> list[str]:
        """Hosts whose agents are neither back nor ``lost``."""
        return sorted(set(self.record.agents).difference(self._serving, lost))

    def back(self) -> list[str]:
        """Hosts whose agents are."""
        return sorted(self._serving)

    def lost(self) -> list[str]:
        """Hosts with no agent in touch that had one, or have members of the newest world, which may live."""
        world = self.record.world
        members = {placement.worker.host for placement in world.members} if world is not None else set()
        return sorted(members.union(self.record.agents).difference(self._serving))

    def remains(self) -> Remains:
        """All that is known."""
        record, world = self.record, self.record.world
        reports = [report for serving in self._serving.values() for report in serving.workers]
        generation = world.generation if world is not None else 0
        stamps = [report.stamp for report in reports if report.generation == generation]
        members = {placement.worker for placement in world.members} if world is not None else None
        exited = {exited.worker for serving in self._serving.values() for exited in serving.exits}
        named = {host.name for host in record.hosts}
        return Remains(
            epoch=record.epoch,
            world=world,
            ages=record.ages,
            next_age=record.next_age,
            highest=record.highest,
            hosts=(*record.hosts, *(t.HostSlots(host, 0) for host in self.back() if host not in named)),
            lost=frozenset(self.lost()),
            living={report.worker: report.generation for report in reports},
            exited=frozenset(exited if members is None else exited & members),
            has_ticked=any(stamp.generation == generation and stamp.ticks > 0 for stamp in stamps),
            has_ended=generation > 0 and any(serving.ended >= generation for serving in self._serving.values()),
            gate_is_open=generation > 0 and any(serving.gate == generation for serving in self._serving.values()),
        )
