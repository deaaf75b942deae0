"""The record of a job, from which a new driver continues it, and the directory of the record.

The record has the hosts to wait for, and the newest world. All else comes from the agents' host reports. The directory
also has the job's id and the sockets of the agents of this machine. Only this user may access it. Driver and agents
hold a shared lock on it while they live: a directory without a lock is stale. The driver alone holds a second lock.

With ``--standbys`` agents keep the record, too, and vote on its entries by the rules of core/register.py. Without it
the only acceptor is the file on this machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

import msgspec
from msgspec.structs import replace

from elasticstate.commits import ID_FILE
from elasticstate.core import types as t
from elasticstate.core.reattach import FROM_LEDGER, Recorded, Remains
from elasticstate.core.register import FEW, FILE, Candidate, Entry, Proposer, Quorum, Version, choose_acceptors
from elasticstate.core.state import Membership, by_discovery
from elasticstate.core.types import listed
from elasticstate.errors import OptionError
from elasticstate.machine import boot_id
from elasticstate.net import messages
from elasticstate.net.names import LOCALHOST, learn_full_name
from elasticstate.net.trust import token_of_job
from elasticstate.options import Options, usable_runtime_directory
from elasticstate.private import is_still, open_directory, open_file, read_file, write_file
from elasticstate.threads import in_thread, next_beat
from elasticstate.writing import BLOCKED_S

_RECORD = "driver.json"
_HISTORY = "history.json"
_DRIVER_LOCK = "driver.lock"
_LOCK_TIMEOUT_S = 0.2  # another process may lock the directory for a moment, to check if the job is dead
_LONGEST_BYTES = 107 - len("/agent-999-99999")  # the kernel's limit for the path of a Unix socket


class JobIsRunningError(OSError):
    """Another driver has the lock on the job's name."""


class Record(Recorded, frozen=True):
    """Facts that a driver needs to reattach, and cannot get from the agents.

    The record is written before its content takes effect: a generation that is not in it was never published.
    """

    job: str
    job_id: str
    token: str
    ports: tuple[int, ...]  # where the agents dial in: of the loopback interface, then of all interfaces
    options: Options
    directory: str  # working directory in which the job was started
    agents: tuple[str, ...] = ()  # hosts with an agent
    clocks: tuple[float, float] = (0.0, 0.0)  # when the record was written: the core's clock, and Unix time
    dashboard_port: int = 0  # 0: no dashboard yet
    is_over: bool = False  # the job has ended and its commits are being removed: no driver may reattach
    places: tuple[str, ...] = ()  # where other hosts reach the driver
    file: str = FILE  # identity of this file among those that keep the record (core/register.py)
    quorums: tuple[Quorum, ...] = ((FILE,),)  # who keeps it
    version: Version | None = None
    boot: str = ""  # of the machine with the file

    @property
    def address(self) -> str:
        """Address at which ``elasticrun status`` asks."""
        return f"127.0.0.1:{self.ports[0]}"


def _path_of(job: str) -> Path:
    return usable_runtime_directory() / f"elasticstate-{os.getuid()}-{job}"


class JobDirectory:
    """The job's directory, locked by its driver. Raises OptionError if a living driver has it, or it cannot be made.

    ``found``: the record of a driver that died before the end of its job; None: the job is new. A driver that died
    while it cleaned up after the end of its job leaves nothing to reattach to. ``seen_at``: Unix time of the last sign
    of life of an earlier driver.
    """

    seen_at = 0.0

    def __init__(self, job: str) -> None:
        self.path = _path_of(job)
        self._removing, self._is_removed = threading.Lock(), False
        if len(os.fsencode(self.path)) > _LONGEST_BYTES:
            raise OptionError(
                f"--job-name: {job!r}: too long: the kernel limits the paths of sockets, which are in {self.path}. "
                "Choose a shorter name, or set XDG_RUNTIME_DIR to a directory with a shorter one."
            )
        try:
            self._lock, self._driver_lock, self.seen_at = self._take_lock()
        except JobIsRunningError as error:
            raise OptionError(
                f"--job-name: {job!r}: a job of this name is already running: {error}. Choose another name, or see its "
                f"state with elasticrun status {job}."
            ) from None
        except OSError as error:
            raise OptionError(
                f"--job-name: {job!r}: the directory {self.path} cannot be used: {error}. Choose another name, or "
                "remove the directory."
            ) from None
        last = _read(self.path)
        self.found = None if last is None or last.is_over or not last.epoch else last
        if self.found is None:
            self._clear(job, is_readable=last is not None)

    def write_id(self, job_id: str) -> None:
        """Write the id of the job that has the directory from now on."""
        write_file(self._lock, ID_FILE, job_id.encode())

    def write(self, record: Record, is_lasting: bool = False) -> None:
        """Replace the record. A reader sees either the old record or the new one.

        ``is_lasting``: the record is on the disk when this returns, also if the machine loses power.
        """
        write_file(self._lock, _RECORD, msgspec.json.encode(record), is_lasting=is_lasting)

    def write_history(self, data: bytes) -> None:
        """Replace the history of the job, which the next driver's dashboard continues. Raises OSError.

        After the directory was removed this does nothing: a file that comes during the removal would keep it.
        """
        with self._removing:
            if not self._is_removed:
                write_file(self._lock, _HISTORY, data)

    def history(self) -> bytes:
        """Return the history of the job; empty if there is none."""
        try:
            return read_file(self._lock, _HISTORY)
        except OSError:
            return b""

    def sign_of_life(self) -> None:
        """Record that the driver lives, for the next driver."""
        with suppress(OSError):  # the file system may have become read-only
            os.utime(self._driver_lock)

    def forget(self) -> None:
        """Remove the record, if possible."""
        with suppress(OSError):  # the file system may have become read-only
            os.unlink(_RECORD, dir_fd=self._lock)

    @property
    def is_lost(self) -> bool:
        """Return True if the directory was deleted or renamed, so that no process finds the record there."""
        return not is_still(self.path, self._lock)

    def make_anew(self, record: Record) -> None:
        """Create the directory again, with this record. Raises OSError if its name is taken by now."""
        lock, driver_lock, _ = self._take_lock()
        self._unlock()
        self._lock, self._driver_lock = lock, driver_lock
        self.write_id(record.job_id)
        self.write(record)

    def give_back(self) -> None:
        """Release the directory, in the state in which it was found."""
        if self.found is None:
            self.remove()
        else:
            self._unlock()

    def remove(self) -> None:
        with self._removing:
            self._is_removed = True
            if not self.is_lost:
                shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._driver_lock)
        os.close(self._lock)

    def _take_lock(self) -> tuple[int, int, float]:
        """Create or take over the directory. Return the locked descriptors of directory and driver's lock file, and the
        last sign of life of an earlier driver."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            lock = open_directory(self.path)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if is_still(self.path, lock):
                    return lock, *_take_driver_lock(lock)
            except (BlockingIOError, FileNotFoundError):  # the directory is being removed
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
            time.sleep(0.01)

    def _clear(self, job: str, is_readable: bool) -> None:
        """Remove the files of a driver that died before it wrote a record, or after the end of its job."""
        if not is_readable and (self.path / _RECORD).exists():
            self._unlock()
            raise OptionError(
                f"--job-name: {job!r}: the record of an earlier job in {self.path} cannot be read. Install the version "
                "of elasticstate that started that job, or remove the directory to start a new job."
            )
        for entry in self.path.iterdir():
            if entry.name != _DRIVER_LOCK and (entry.is_symlink() or not entry.is_dir()):
                entry.unlink()


def _take_driver_lock(directory: int) -> tuple[int, float]:
    fd = open_file(directory, _DRIVER_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 20).decode(errors="replace")
        os.close(fd)
        raise JobIsRunningError(f"its driver is process {pid}") from None
    seen_at = os.fstat(fd).st_mtime
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd, seen_at


def _read(path: Path) -> Record | None:
    try:
        directory = open_directory(path)
    except OSError:
        return None
    try:
        return msgspec.json.decode(read_file(directory, _RECORD), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(directory)


def find_job(job: str) -> Record | None:
    """Return the record of a job of this user, or None. Raises OptionError if the runtime directory is unusable."""
    return _read(_path_of(job))


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
    return Record(job, secrets.token_hex(8), token, (), options, os.getcwd(), epoch=1)


def next_record(last: Record, options: Options, job: str) -> Record:
    """Return the record of a driver that reattaches. Raises OptionError if it runs another command."""
    if options.command != last.options.command:
        raise OptionError(
            f"--job-name: {job!r}: a job of this name lost its driver, and it runs another command, "
            f"{shlex.join(last.options.command)}. Choose another name, or end that job with elasticrun --reattach "
            f"{job} and Ctrl-C."
        )
    return replace(last, epoch=last.epoch + 1, options=options)


def newer(
    old: Record, m: Membership, ports: tuple[int, ...], clocks: tuple[float, float], places: tuple[str, ...] = ()
) -> Record | None:
    """Return the record for the current state; None if it has not changed.

    ``clocks``: the core's clock, and Unix time. The next driver must know them, because it may have another clock.
    """
    members = [placement.worker for placement in m.world.members] if m.world is not None else []
    ledger = {name: getattr(m.ledger, name) for name in FROM_LEDGER}
    ledger |= {"account": m.ledger.account.until(clocks[0]), "total": m.ledger.total + m.ledger.losses}
    new = replace(
        old,
        ports=ports,
        places=places,
        agents=tuple(sorted(host.name for host in m.hosts.values() if host.agent == "joined")),
        hosts=tuple(t.HostSlots(host.name, host.slots, host.rack) for host in by_discovery(m) if host.slots),
        world=m.world,
        # 0 for a member that has ended already (of a plain world, where ages have no meaning)
        ages=old.ages if m.world is old.world else tuple(m.workers[w].age if w in m.workers else 0 for w in members),
        first_round=_first_round(m),
        layouts=m.shards.layouts,
        ended=m.shards.ended,
        replicated=m.shards.replicated,
        clocks=clocks,
        **ledger,
    )
    figures, old_figures = ((each.account.activity, each.failures, each.total) for each in (new, old))
    return None if figures == old_figures and _has_only_new_figures(old, new) else new


def _has_only_new_figures(old: Record, new: Record) -> bool:
    """Return True if an old record serves as well: with older figures, and an older commit than the newest."""
    figures = {name: getattr(old, name) for name in ("account", "failures", "failed", "total", "clocks", "durable")}
    return replace(new, highest=old.highest or new.highest, **figures) == old


def _first_round(m: Membership) -> tuple[t.Placement, ...]:
    """Return the members of a round of which it is not known if they use ``run``: they have no world."""
    present = m.ledger.round
    return () if present is None or present.end or m.ledger.kind else present.members


def value_of(record: Record) -> bytes:
    """Return the record as the agents keep it: without the token, and with what belongs to the entry itself."""
    return msgspec.msgpack.encode(replace(record, token="", quorums=(), version=None, boot=""))


class ReplacedError(Exception):
    """A newer driver leads the job, or may lead it: this one must stop, and end nothing."""


class Votes:
    """The votes of agents on the entries of this driver."""

    def __init__(
        self, proposer: Proposer, file: str, is_replicated: bool, wake: Callable[[], None] = lambda: None
    ) -> None:
        """``file``: identity of the file on this machine. ``wake``: called when ``check`` raises from now on."""
        self.send: Callable[[str, messages.VoteRequest], None] = lambda *_: None  # to the agent with this identity
        self.is_replicated = is_replicated
        self.file = file
        self.proposer = proposer
        self._wake = wake
        self._changed = asyncio.Event()
        self._newer = ""  # who has replaced this driver
        self.is_waiting = False  # for a majority

    def wanted(self, connected: Callable[[], Sequence[Candidate]]) -> Quorum | None:
        """Return the set of acceptors that should replace the present one, or None."""
        if not self.is_replicated:
            return None
        candidates = connected()
        hosts = {candidate.host for candidate in candidates}
        if LOCALHOST not in hosts and len(hosts) < FEW:  # else an agent can keep the record
            candidates = [*candidates, Candidate(self.file, LOCALHOST)]
        best = choose_acceptors(self.proposer.present, candidates, len(hosts), self.file)
        return best if frozenset(best) != frozenset(self.proposer.present) else None

    def keepers(self) -> Quorum:
        """Return the acceptors that keep the record; none: the file on this machine alone."""
        return self.proposer.present if self.proposer.present != (self.file,) else ()

    def propose(self, value: bytes, wanted: Quorum | None) -> Entry:
        """Begin to write the next entry, and ask for the votes of all acceptors. Raises ReplacedError."""
        self.check()
        entry = self.proposer.write(value, wanted)
        for acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))
        return entry

    def filed(self, entry: Entry) -> None:
        """Count the vote of the file on this machine."""
        self.proposer.accepted(self.file, entry.version)
        self._changed.set()

    def connected(self, acceptor: str) -> None:
        """Ask an agent again that has connected or reconnected."""
        entry = self.proposer.entry
        if entry is not None and acceptor in entry.acceptors:
            self.send(acceptor, messages.Accept(entry))

    def received(self, acceptor: str, message: messages.Vote) -> None:
        """Count the vote of an agent."""
        match message:
            case messages.Accepted(version):
                self.proposer.accepted(acceptor, version)
            case messages.VoteRefused(by):
                self.proposer.refused(by)
        self._changed.set()
        if self.proposer.is_lost:
            self._wake()

    def replaced(self, by: str) -> None:
        """Record that another driver leads the job: ``by`` tells which one."""
        self._newer = self._newer or by
        self._changed.set()
        self._wake()

    def check(self) -> None:
        """Raise ReplacedError if a newer driver leads the job, or may lead it."""
        if self._newer or self.proposer.is_lost:
            raise ReplacedError(self._newer or "a newer driver has asked the agents for their votes")

    def has(self, entry: Entry) -> bool:
        """Return True if this entry, or a newer one, can never be lost."""
        chosen = self.proposer.chosen
        return chosen is not None and chosen >= entry.version

    async def chosen(self, entry: Entry, limit_s: float) -> None:
        """Wait until this entry can never be lost. Raises ReplacedError, also if no majority answers in time."""
        try:
            self.is_waiting = True
            await self._chosen(entry, limit_s)
        finally:
            self.is_waiting = False

    async def _chosen(self, entry: Entry, limit_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + limit_s
        self.check()
        while not self.has(entry):
            self._changed.clear()
            left_s = deadline - asyncio.get_running_loop().time()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({waiting}, timeout=max(0.0, left_s))
            waiting.cancel()
            self.check()
            if left_s <= 0:
                raise ReplacedError(
                    f"no majority of those that keep the record of this job has answered for {limit_s:g} s, so another "
                    "driver may lead it"
                )


class RecordOverview(msgspec.Struct, frozen=True):
    """Hosts that keep the record of a job with ``--standbys``."""

    hosts: tuple[str, ...] = ()  # empty: the driver's machine alone
    standbys: tuple[str, ...] = ()  # hosts on which the next driver waits

    def line(self) -> str:
        """Return the losses that the job would survive."""
        if not self.hosts:
            return (
                "record: on the driver's machine alone, because fewer than two other hosts have agents: the job would "
                "not survive the loss of this machine"
            )
        count = (len(self.hosts) - 1) // 2
        then = f"a standby on {listed(list(self.standbys))}" if self.standbys else "elasticrun --reattach --listen"
        return (
            f"record: kept on {listed(list(self.hosts))}: the job would survive the loss of any {count} of them at a "
            f"time, and that of the driver's machine ({then} would continue it)"
        )


class Keeper:
    """Keeps the record of a job. Await ``keep`` after each step of the core, before its effects are carried out."""

    def __init__(
        self,
        directory: JobDirectory,
        record: Record,
        warn: Callable[[str], None],
        votes: Votes,
        candidates: Callable[[], Sequence[Candidate]] = tuple,
        missing: Callable[[Iterable[str]], str] = listed,
        limit_s: float = inf,
    ) -> None:
        """``candidates``: the agents that may keep the record now. ``missing``: names acceptors for the user.

        ``limit_s``: for the agents' answers.
        """
        self._limit_s = limit_s
        self.record = record
        self._directory = directory
        self._warn = warn
        self._votes, self._candidates, self._missing = votes, candidates, missing
        self._is_written = True
        self._writing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._entry = self._propose(None)
        self._note(self._write(self.record))
        votes.filed(self._entry)

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

    async def keep(self, m: Membership, ports: tuple[int, ...], now: float, places: tuple[str, ...] = ()) -> None:
        """Write the record if it has changed. A file system that hangs delays effects, but not the event loop.

        Raises ReplacedError.
        """
        async with self._writing:
            record = newer(self.record, m, ports, (now, time.time()), places)
            may_stay = self._is_written and record is not None and _has_only_new_figures(self.record, record)
            if record is not None:
                self.record = record
            wanted = self._votes.wanted(self._candidates)
            if record is not None or wanted is not None or not (self._is_written and self._votes.has(self._entry)):
                await self._put(wanted, may_stay)
                while self._votes.proposer.is_changing:
                    await self._put(None)

    @property
    def is_due(self) -> bool:
        """Return True if other agents should keep the record."""
        return self._votes.wanted(self._candidates) is not None

    async def _put(self, wanted: Quorum | None, may_stay: bool = False) -> None:
        """Write the record to the file, and to the agents that keep it."""
        last = self.record.quorums
        self._entry = self._propose(wanted)
        late = asyncio.get_running_loop().call_later(BLOCKED_S, self._complain)
        try:
            self._note(await in_thread(self._write, self.record, may_stay, self.record.quorums != last))
            self._votes.filed(self._entry)
            await self._votes.chosen(self._entry, self._limit_s)
        finally:
            late.cancel()

    def _propose(self, wanted: Quorum | None) -> Entry:
        entry = self._votes.propose(value_of(self.record) if self._votes.is_replicated else b"", wanted)
        self.record = replace(self.record, quorums=entry.quorums, version=entry.version, boot=boot_id())
        return entry

    def _complain(self) -> None:
        waits = f"after {BLOCKED_S:g} s; decisions of the driver wait for the record"
        agents = [acceptor for acceptor in self._votes.proposer.missing() if acceptor != self._votes.file]
        if agents:
            self._warn(f"the agents of {self._missing(agents)} have not kept the record {waits}")
        else:
            self._warn(f"{self._directory.path} is not written {waits}")

    async def job_is_over(self, limit_s: float) -> None:
        """Mark the job as over in the record. Call this before the first commit is removed. Raises ReplacedError.

        ``limit_s``: seconds for agents that keep the record, and may be lost.
        """
        try:
            await asyncio.wait_for(self._end(), limit_s)
        except asyncio.TimeoutError:
            self._warn("the agents that keep the record of this job do not know that it is over")

    async def _end(self) -> None:
        async with self._writing:  # the watch must not write an older record now
            if self._watching is not None:
                self._watching.cancel()
            self.record = replace(self.record, is_over=True)
            await self._put(None)

    def _write(self, record: Record, may_stay: bool = False, is_lasting: bool = False) -> str:
        """Write the record. Return why that failed, or "".

        After a failure the record is removed: with an old one the next driver would reuse numbers of generations.
        ``may_stay``: the old one stays instead, because only its figures are old.
        """
        try:
            self._directory.write(record, is_lasting)
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


def lost_hosts(events: Iterable[t.Event]) -> list[str]:
    """Return the hosts that events report as lost."""
    return sorted({event.host for event in events if isinstance(event, t.AgentLost)})


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
        recorded = {name: getattr(record, name) for name in Recorded.__struct_fields__}
        recorded["account"] = record.account.shifted(now - max(0.0, unix - record.clocks[1]) - record.clocks[0])
        recorded["hosts"] = (*record.hosts, *(t.HostSlots(host, 0) for host in self.back() if host not in named))
        return Remains(
            **recorded,
            seen_at=now - max(0.0, unix - max(self._seen_at, record.clocks[1])),
            lost=frozenset(self.lost()),
            living={report.worker: report.generation for report in reports},
            exited=frozenset(exited if members is None else exited & members),
            ticks=max((stamp.ticks for stamp in stamps if stamp.generation == generation), default=0),
            has_ended=generation > 0 and any(host_report.ended >= generation for host_report in self._reports.values()),
            gate_is_open=generation > 0
            and any(host_report.gate == generation for host_report in self._reports.values()),
        )
