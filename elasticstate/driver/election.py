"""The election of a new driver, on any machine: it learns the job's record from the agents that have lost the driver.

The rules are in core/register.py. Agents that have lost their driver dial the places where the next one may listen. If
a majority of the acceptors is here, no other driver has one, and this one asks for their votes. ``Standbys`` keeps
processes on other hosts that wait for this.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import msgspec

from elasticstate.core.register import Candidate, Entry, Proposer
from elasticstate.core.types import listed
from elasticstate.driver.record import JobDirectory, Record, ReplacedError, first_record, value_of
from elasticstate.errors import OptionError
from elasticstate.machine import boot_id, host_name
from elasticstate.net import messages
from elasticstate.net.control import AgentStream, ControlServer, tell_replaced
from elasticstate.net.names import LOCALHOST, any_address, host_port
from elasticstate.net.trust import Trust, token_of_job
from elasticstate.options import Options
from elasticstate.options.kinds import split_address
from elasticstate.processes import reading


class Elected(NamedTuple):
    """A driver that leads the job: its proposer, and the record, as the last driver has left it, by this clock."""

    proposer: Proposer
    record: Record
    silent_s: float  # since an agent received anything from the last driver
    hosts: frozenset[str] = frozenset()  # of the agents that took part, and dial again
    last_places: tuple[str, ...] = ()  # where the last driver can be reached, if it lives
    stood_by: bool = False  # the agents knew its place before they lost the last driver

    async def tell_the_last_driver(self) -> None:
        """Tell the last driver that it is replaced, until it hears that: it may be frozen, or cut off."""
        assert self.proposer.ballot is not None
        trust, word = Trust(self.record.token), messages.Replaced(self.proposer.ballot.number, host_name())
        pause_s = 1.0
        while places := self.last_places:
            telling = (tell_replaced(place, trust, self.record.options.connect_timeout_s, word) for place in places)
            answers = await asyncio.gather(*telling, return_exceptions=True)
            if None in answers:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def at(self, ports: tuple[int, ...], listen: str | None, file: str = "") -> Elected:
        """Return the same with the places where the agents will dial this driver.

        ``file``: identity of the record's file on this machine; "": there has been none.
        """
        options = replace(self.record.options, job_name=self.record.job, listen=listen)
        file = file or f"file-{secrets.token_hex(4)}"
        return self._replace(record=msgspec.structs.replace(self.record, ports=ports, options=options, file=file))


_LONGEST_PAUSE_S = 30.0
_LOOK_INTERVAL_S = 0.05
_AGENTS_COME_S = 2.0  # an agent without a driver dials at least once in a second


class Election:
    """The port where agents that have lost their driver connect. ``await won()``; then ``await close()``."""

    def __init__(
        self,
        job: str,
        token: str,
        identity: str,
        connect_timeout_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._job, self._token, self._log = job, token, log
        self._server = ControlServer(Trust(token), connect_timeout_s, self)
        self._streams: dict[str, AgentStream] = {}  # by the identity of the agent
        self._voters: dict[str, tuple[messages.Voter, float]] = {}  # what they have said, and when
        self._proposer = Proposer(identity)
        self._is_preparing = False
        self._silent_s = 0.0  # a majority must have heard nothing for so long
        self._again_at = -inf  # after a refusal, the time of the next attempt
        self._replaced = ""
        self._file: tuple[str, Entry] | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._reason = ""

    def listen(self, host: str, port: int = 0) -> int:
        """Listen at an address; may be called for several. Return the port. Raises OSError."""
        return self._server.listen(host, port)

    def add_file(self, record: Record) -> None:
        """Let the file on this machine vote, unless the machine was started since: the file may be an older one then.

        Its lock is its promise: nobody else writes it.
        """
        assert record.version is not None
        if record.boot != boot_id():
            return
        self._file = record.file, Entry(record.version, record.quorums, value_of(record))

    async def close(self) -> None:
        """Close all connections: the agents dial again."""
        await self._server.stop()

    async def won(self, silent_s: float = 0.0, new_after_s: float | None = None) -> Elected | None:
        """Wait until this driver leads the job. Raises ReplacedError if another one does.

        Args:
            silent_s: seconds that a majority must have heard nothing from the last driver, and promised nothing to a
                rival: else several standbys would replace each other.
            new_after_s: return None if agents have dialled in, and none keeps a record of the job: at once if they have
                served no driver, else after so long. None: never.
        """
        self._silent_s = silent_s
        while True:
            if self._replaced:
                raise ReplacedError(self._replaced)
            if self._proposer.is_leader:
                return self._elected()
            if self._may_begin():
                self._begin()
            if new_after_s is not None and self._is_new(new_after_s):
                return None
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({waiting}, timeout=_LOOK_INTERVAL_S)
            waiting.cancel()

    def _is_new(self, orphans_learn_s: float) -> bool:
        if not self._streams or self._entries() or self._voters.keys() != self._streams.keys():
            return False
        orphans = any(stream.hello.epoch for stream in self._streams.values())
        waited_s = self._loop.time() - self._opened_at
        return waited_s > _AGENTS_COME_S + (orphans_learn_s if orphans else 0.0)

    def _elected(self) -> Elected:
        assert self._proposer.learned is not None
        record = msgspec.msgpack.decode(self._proposer.learned.value, type=Record)
        now, voters = self._loop.time(), self._voters.values()
        silent_s = min((voter.silent_s + now - at for voter, at in voters), default=0.0)
        newest = self._proposer.learned.version
        ages = [voter.age_s + now - at for voter, at in voters if voter.entry and voter.entry.version == newest]
        clocks = (record.clocks[0], time.time() - min(ages, default=silent_s))  # the hosts' clocks differ
        known = msgspec.structs.replace(record, token=self._token, clocks=clocks, places=())
        hosts = frozenset(stream.hello.host for stream in self._streams.values())
        return Elected(self._proposer, known, silent_s, hosts, record.places, self._silent_s > 0)

    def _may_begin(self) -> bool:
        """Return True if the agents here are enough, as far as they know, and have missed a driver for long enough."""
        now = self._loop.time()
        entries = self._entries()
        if not entries or self._is_preparing or now < self._again_at:
            return False
        newest = max(entries, key=lambda entry: entry.version)
        record = msgspec.msgpack.decode(newest.value, type=Record)
        if record.job != self._job:
            self._say(f"the agents here belong to another job, {record.job}")
            return False
        here = {*self._voters, *([self._file[0]] if self._file else [])}
        missed = here - self._voters.keys()
        for name, (voter, at) in self._voters.items():
            if min(voter.silent_s, voter.promised_s) + now - at >= self._silent_s:
                missed.add(name)
        for quorum in newest.quorums:
            if 2 * len(missed.intersection(quorum)) <= len(quorum):
                found = len(here.intersection(quorum))
                self._say(
                    f"waiting for those that keep the record of job {self._job}: {found} of {len(quorum)} are here, "
                    "and more than half of them are needed"
                )
                return False
        return True

    def _entries(self) -> list[Entry]:
        found = [voter.entry for voter, _ in self._voters.values() if voter.entry is not None]
        return found if self._file is None else [*found, self._file[1]]

    def _say(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._log(reason)

    def _begin(self) -> None:
        """Ask all agents here for their promises."""
        self._is_preparing = True
        numbers = [entry.version.ballot.number for entry in self._entries()]
        epochs = [stream.hello.epoch for stream in self._streams.values()]
        ballot = self._proposer.begin(max(self._proposer.next_number, 1 + max([*numbers, *epochs])))
        if self._file is not None:
            self._proposer.promised(self._file[0], ballot, self._file[1])
        for stream in self._streams.values():
            stream.send(messages.Prepare(ballot))

    # ------------------------------------------------------------------------------------------ callbacks of the server

    def agent_joined(self, stream: AgentStream) -> None:
        """Ask an agent what it knows."""
        self._streams[stream.hello.agent] = stream
        stream.send(messages.NotLeading())

    def agent_sent(self, stream: AgentStream, message: messages.FromAgent) -> None:
        """Count the vote of an agent."""
        acceptor = stream.hello.agent
        match message:
            case messages.Voter():
                self._voters[acceptor] = message, self._loop.time()
                if self._is_preparing:
                    assert self._proposer.ballot is not None
                    stream.send(messages.Prepare(self._proposer.ballot))
            case messages.Promised(promised, entry):
                self._proposer.promised(acceptor, promised, entry)
            case messages.VoteRefused(by):
                self._proposer.refused(by)
                if self._proposer.ballot is not None and by.number >= self._proposer.ballot.number:
                    self._give_up(random.uniform(0.0, self._silent_s))
        learned, ballot = self._proposer.learned, self._proposer.ballot
        if learned is not None and ballot is not None and learned.version.ballot.number >= ballot.number:
            self._give_up()
        self._changed.set()

    def _give_up(self, pause_s: float = 0.0) -> None:
        """Leave this attempt for another one with a higher number, after a random pause if a rival is under way."""
        if self._is_preparing:
            self._is_preparing, self._again_at = False, self._loop.time() + pause_s

    def agent_lost(self, stream: AgentStream, reason: str) -> None:
        """Forget an agent: it may have found another driver."""
        if self._streams.get(stream.hello.agent) is stream:
            del self._streams[stream.hello.agent]
            self._voters.pop(stream.hello.agent, None)

    def status(self, as_json: bool) -> str:
        """Answer ``elasticrun status``."""
        names = sorted(stream.hello.host for stream in self._streams.values())
        here = f"agents of {listed(names)} have dialled in" if names else "no agent has dialled in"
        text = self._reason or f"job {self._job}: waits for the agents that have lost its driver; {here}"
        return msgspec.json.encode({"job": self._job, "reason": text}).decode() + "\n" if as_json else text + "\n"

    def refused(self, peer: str, reason: str) -> None:
        """Report a connection that was refused."""
        self._log(f"refused a connection from {peer}: {reason}")

    def replaced(self, epoch: int, at: str) -> None:
        """Give up: another driver leads the job."""
        self._replaced = f"the job continues with a newer driver on host {at}"
        self._changed.set()


async def elected_here(
    options: Options, must_reattach: bool, directory: JobDirectory, log: Callable[[str], None]
) -> Elected | None:
    """Wait until this driver leads a job whose record is kept by agents; None if there is no such job.

    ``elasticrun status`` finds the election in the job's directory. Raises OptionError or ReplacedError.
    """
    job, found = options.job_name or "", directory.found
    if found is not None and found.quorums != ((found.file,),):
        places = list(zip((LOCALHOST, any_address()), found.ports, strict=False))
        token = found.token
    elif found is None and options.listen is not None and options.standbys is not None and job:
        places, token = [(LOCALHOST, 0)], token_of_job(options.token_file)
    else:
        return None
    if options.listen is not None:
        places.append(split_address(options.listen))
    new_after_s = options.heartbeat_timeout_s if found is None and not must_reattach else None

    def listening(ports: tuple[int, ...]) -> None:
        if found is None:
            directory.write(msgspec.structs.replace(first_record(options, job), epoch=0, ports=ports))

    elected = await elect(job, token, places, options.connect_timeout_s, log, listening, found, new_after_s)
    if elected is None or found is None:
        return elected.at((), options.listen) if elected is not None else None
    return elected.at(found.ports, options.listen, found.file)._replace(last_places=())


async def elect(
    job: str,
    token: str,
    places: Sequence[tuple[str, int]],
    connect_timeout_s: float,
    log: Callable[[str], None],
    listening: Callable[[tuple[int, ...]], None] = lambda _: None,
    found: Record | None = None,
    new_after_s: float | None = None,
) -> Elected | None:
    """Listen at these addresses and ports until this driver leads the job. Raises OptionError or ReplacedError.

    ``listening``: gets the ports. ``found``: the record on this machine. ``new_after_s``: see ``Election.won``.
    """
    election = Election(job, token, secrets.token_hex(4), connect_timeout_s, log)
    if found is not None:
        election.add_file(found)
    try:
        try:
            ports = []
            for place in places:
                ports.append(election.listen(*place))
        except OSError as error:
            raise OptionError(
                f"--reattach: {job!r}: its agents dial port {place[1]}, and no driver can listen there "
                f"({error.strerror}). Stop the process that uses this port."
            ) from None
        listening(tuple(ports))
        return await election.won(new_after_s=new_after_s)
    finally:
        await election.close()


async def stand_by(
    order: messages.StandbyOrder, log: Callable[[str], None], listening: Callable[[int], None]
) -> Elected | None:
    """Wait until this driver leads the job. Return None if stdin ends before. Raises ReplacedError.

    ``listening``: gets the port.
    """
    election = Election(order.job, order.token, secrets.token_hex(4), order.connect_timeout_s, log)
    async with reading(os.fdopen(0, "rb", closefd=False)) as stdin:
        winning = asyncio.ensure_future(election.won(order.heartbeat_timeout_s))
        reading_on = asyncio.ensure_future(stdin.read())
        try:
            port = election.listen(any_address())
            listening(port)
            await asyncio.wait({winning, reading_on}, return_when=asyncio.FIRST_COMPLETED)
            if not winning.done():
                return None
            elected = winning.result()
            assert elected is not None
            dialled = elected.record.options.listen is not None
            return elected.at((), host_port(any_address(), port)) if dialled else elected.at((0, port), None)
        finally:
            winning.cancel()
            reading_on.cancel()
            await election.close()


class Standbys:
    """Standbys on ``number`` hosts, if so many other hosts have agents. All agents get their addresses."""

    def __init__(
        self,
        number: int,
        send: Callable[[str, messages.ToAgent], object],
        send_to_all: Callable[[messages.ToAgent], None],
        warn: Callable[[str], None],
    ) -> None:
        self._number = number
        self._send, self._send_to_all, self._warn = send, send_to_all, warn
        self._chosen: dict[str, str] = {}  # by host: the address; "": not known yet
        self._failed: set[str] = set()
        self._known: dict[str, tuple[str, ...]] = {}  # by host: the addresses that its agent knows

    def known_to(self, hosts: Iterable[str]) -> tuple[str, ...]:
        """Return the hosts whose standby all agents of ``hosts`` would find: those that keep the record elect it."""
        known = [self._known.get(host, ()) for host in hosts]
        return tuple(host for host, address in self._addresses().items() if all(address in each for each in known))

    def _addresses(self) -> dict[str, str]:
        return {host: address for host, address in self._chosen.items() if address}

    def look(self, candidates: Callable[[], Iterable[Candidate]]) -> None:
        """Start those that are missing, on the hosts of the agents that have joined first."""
        for candidate in candidates() if len(self._chosen) < self._number else ():
            host = candidate.host
            if len(self._chosen) < self._number and host not in (LOCALHOST, *self._chosen, *self._failed):
                self._chosen[host] = ""
                self._send(host, messages.RunStandby())

    def received(self, host: str, message: messages.StandbyListens, address: str) -> None:
        """Tell all agents of a standby that listens, or listens no more. ``address``: of the host."""
        if message.port:
            self._chosen[host] = host_port(address, message.port)
        else:
            self._warn(f"the standby on host {host} {message.reason}")
            self._failed.add(host)
            self._chosen.pop(host, None)
        self._tell()

    def host_joined(self, host: str) -> None:
        """Tell an agent that has connected."""
        if self._number:
            self._send(host, self._message())

    def known(self, host: str, addresses: tuple[str, ...]) -> None:
        """Note what the agent of a host knows."""
        self._known[host] = addresses

    def host_lost(self, host: str) -> None:
        """Forget the standby of a host: it may live, but another one is needed."""
        self._known.pop(host, None)
        self._failed.discard(host)
        if self._chosen.pop(host, ""):
            self._tell()

    def _tell(self) -> None:
        self._send_to_all(self._message())

    def _message(self) -> messages.Standbys:
        return messages.Standbys(tuple(self._addresses().values()))
