"""The agents of a job: their processes, their connections, and the messages to them.

What they send goes to the driver (driver.py). An unreachable agent on another host need not be dead: it may connect
again, with its workers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from elasticstate import commits as commit_directory
from elasticstate.core import types as t
from elasticstate.core.ids import without_case
from elasticstate.core.register import Candidate
from elasticstate.driver.output import CountedLines
from elasticstate.driver.record import Votes
from elasticstate.errors import OptionError
from elasticstate.launchers import AdoptedAgent, AgentProcess, DialledIn, HostLaunchers
from elasticstate.net import messages, names
from elasticstate.net.control import AgentStream, ControlServer
from elasticstate.net.trust import Strangers, Trust
from elasticstate.options import CONNECT_TIMEOUT_S, agent_variable, passed_on
from elasticstate.options.kinds import is_host_name, split_address
from elasticstate.processes import kill_marked
from elasticstate.threads import in_thread, next_beat


@dataclass(slots=True, eq=False)
class AgentHandle:
    """Record of one agent: its host, process and connection."""

    host: str
    id: str
    process: AgentProcess
    since: float  # time when it was started or lost
    stream: AgentStream | None = None
    pid: int | None = None
    slots: int = 0  # offered by an agent that has dialled in
    rack: str = ""  # named by it
    watcher: asyncio.Task[None] | None = None
    has_reported: bool = False  # its host is locked: no earlier agent of the job lives there
    is_witness: bool = False  # has no workers, and only keeps the record
    is_stopping: bool = False  # Shutdown was sent
    is_lost: bool = False
    has_ended: bool = False  # its process on this machine


_LOOKS_PER_TIMEOUT = 20  # checks for silent agents within --heartbeat-timeout
_LOOKS_PER_HEARTBEAT = 5  # a heartbeat to each agent at every 5th check only, because it costs more
_LONGEST_INTERVAL_S = 1.0
_ADDRESSES_KEPT_S = 1.0
_LAST_MOMENT_S = 0.1
_IN_FLIGHT_S = 1.0  # data of an agent that arrives so long after the next one has dialled in was sent after that
_LOOK_INTERVAL_S = 0.05
_RESOLVER_TIMEOUT_S = 2.0
_BAD_NAME = "the agent's host name is invalid. Use letters, digits, dots, dashes and underscores, and no dot first"


class BackgroundTasks:
    """Tasks of one owner. ``wake`` is called when one has failed; then ``check`` raises its error."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._tasks: set[asyncio.Future[None]] = set()
        self._error: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def check(self) -> None:
        """Raise the error of a task: a driver that no longer watches its agents must not continue."""
        if self._error is not None:
            raise self._error


class Agents:
    """The agents of a job. ``post`` gets AgentLost, ``received(host, message)`` each message, HostReport first."""

    def __init__(
        self,
        spec: messages.JobSpec,
        token: str,
        directory: Path,
        post: Callable[[t.Event], None],
        received: Callable[[str, messages.FromAgent], None],
        status: Callable[[bool], str],
        warn: Callable[[str], None],
        log: Callable[[str], None],
        votes: Votes,
        strangers: Strangers | None = None,
    ) -> None:
        """``votes``: gets those of all agents. ``strangers``: the unauthenticated connections of all ports of this
        process."""
        self._spec = spec
        self._post = post
        self._received = received
        self.status = status
        self._tasks = BackgroundTasks(lambda: post(t.TimePassed()))
        self._token = token
        self._directory = directory
        self._log = log
        self._votes = votes
        votes.send = self._ask_for_vote
        self._own_hosts: dict[str, bool] = {}  # True: names of this machine
        self.refused = CountedLines(warn).refused
        self._server = ControlServer(Trust(token), spec.options.connect_timeout_s, self, strangers)
        self.is_open = False  # for other hosts
        self.ports: tuple[int, ...] = ()  # where agents connect: of the loopback interface, then of all interfaces
        self._addresses: tuple[str, ...] = ()
        self._found_at: tuple[float, tuple[str, ...]] = (-inf, ())  # time, and the addresses of this machine then
        self._own_address = ""  # at which the other hosts reach this one; empty: not known
        self._launchers = HostLaunchers(spec.options)
        self._started = 0
        self._running: set[AgentHandle] = set()  # agents whose process lives, or is not cleaned up yet
        self._agents: dict[str, AgentHandle] = {}  # current agent of each host
        self._away: dict[str, AgentHandle] = {}  # by id: unreachable, but perhaps alive
        self._stopped: set[str] = set()  # ids of agents that were lost while they stopped
        self._has_news = False  # the agents that have dialled in have changed
        self._rivals: dict[str, AgentStream] = {}  # by host: dialled in while another agent of the host is connected
        self._named: frozenset[str] = frozenset()  # hosts that discovery has named so far, beside agents that dial in
        self._leaving: frozenset[str] = frozenset()  # those of them that it does not name any more
        self._racks: dict[str, str] = {}  # by host, as discovery names them beside agents that dial in
        self._silence: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------ the ports

    def listen(self, ports: tuple[int, ...] = ()) -> None:
        """Listen on the previous driver's ``ports``, or on any; port 0: any. Raises OptionError."""
        if self._dial_in:
            self._listen_for_hosts()
        try:
            self.ports = (self._server.listen(names.LOCALHOST, *ports[:1]),)
            self._addresses = (f"{names.LOCALHOST}:{self.ports[0]}",)
            if ports[1:]:
                self.open(ports[1])
        except OSError as error:
            raise OptionError(
                f"--job-name: {self._spec.job!r}: its agents connect to the ports {', '.join(map(str, ports))}, and "
                f"the driver cannot listen there ({error.strerror}). Stop the process that uses these ports."
            ) from None
        self._silence = self._tasks.start(self._watch_silence())

    def _listen_for_hosts(self) -> None:
        """Listen for agents that dial in (``--listen``): each of them is a host. Raises OptionError."""
        options = self._spec.options
        assert options.listen is not None
        host, port = split_address(options.listen)
        try:
            port = self._server.listen(host, port)
        except OSError as error:
            raise OptionError(
                f"--listen: {options.listen!r}: {error.strerror}. Give an address of this machine and a free port."
            ) from None
        self.is_open = True
        shown = host
        if host in ("0.0.0.0", "::"):
            own = names.own_addresses(options.network_interface)
            shown = next((address for address in own if host == "::" or ":" not in address), names.LOCALHOST)
        command = f"elasticrun agent --join {names.host_port(shown, port)} --token-file {options.token_file}"
        self._log(f"waiting for agents: run {command} on each host")

    def open(self, port: int = 0) -> None:
        """Listen for other hosts, too. Call this before the first agent is started. Raises OSError."""
        port = self._server.listen(names.any_address(), port)
        self.ports = (self.ports[0], port)
        own = names.own_addresses(self._spec.options.network_interface)
        of_ipv4 = sum(":" not in address for address in own) or len(own)
        addresses = (*own[:of_ipv4], names.LOCALHOST, *own[of_ipv4:])  # loopback is for hosts that are this machine
        self._addresses = tuple(names.host_port(address, port) for address in addresses)
        self.is_open = True

    @property
    def places(self) -> tuple[str, ...]:
        """Where other hosts reach this driver. The addresses of this machine are looked up again after a second."""
        if _now() > self._found_at[0] + _ADDRESSES_KEPT_S:
            self._found_at = _now(), names.own_addresses()
        port = split_address(self._spec.options.listen)[1] if self._spec.options.listen else 0
        ports = [port] if port else self.ports[1:]
        return tuple(names.host_port(address, port) for address in self._found_at[1] for port in ports)

    async def learn_own_address(self, hosts: Sequence[str]) -> None:
        """Find the address at which these hosts reach this one, for its workers: it may have several."""
        if self.is_open and not self._dial_in and any(map(names.is_this_machine, hosts)):
            try:
                found = await asyncio.wait_for(in_thread(names.address_towards, hosts), _RESOLVER_TIMEOUT_S)
            except TimeoutError:  # ssh will report the names
                found = names.outward_address()
            self._own_address = found

    @property
    def _dial_in(self) -> bool:
        return self._spec.options.listen is not None

    async def _watch_silence(self) -> None:
        """Count silent agents as lost, even if their process lives: it may be unreachable or stopped. Send heartbeats,
        so that agents can do likewise."""
        options = self._spec.options
        interval_s = min(_LONGEST_INTERVAL_S, options.heartbeat_timeout_s / _LOOKS_PER_TIMEOUT)
        limit_s = options.heartbeat_timeout_s
        looked_at = forgiven_until = _now()
        looks = 0
        while True:
            await next_beat(interval_s)
            now = _now()
            stalled_s = now - looked_at - interval_s
            looked_at = now
            looks += 1
            if stalled_s > _LONGEST_INTERVAL_S:  # this driver was stopped, and the agents may have been, too
                forgiven_until = now
            for agent in list(self._agents.values()):
                if agent.stream is not None:
                    if looks % _LOOKS_PER_HEARTBEAT == 0:
                        agent.stream.write(b"")
                    if now - max(agent.stream.received_at, forgiven_until) > limit_s:
                        self._lose(agent, f"sent no heartbeat for --heartbeat-timeout of {limit_s:g} s")
                elif now - max(agent.since, forgiven_until) > options.start_timeout_s:
                    self._lose(agent, f"did not connect within --start-timeout of {options.start_timeout_s:g} s")

    # -------------------------------------------------------------------------------------------------- the processes

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or ""."""
        if self._dial_in:
            return ""
        if self._spec.options.standbys is not None and names.is_of_each_machine(host):
            return f"host {host!r} is another machine on each host, which --standbys does not allow"
        if reason := self._launchers.refuse(host):
            return reason
        if names.is_this_machine(host) or self.is_open or not self._started:
            return ""
        return (
            f"host {host!r} is another machine, but all hosts of the job were this machine when the job started. Its "
            "workers listen on the loopback interface, which another machine cannot reach"
        )

    def start(self, host: str) -> None:
        """Start the agent of a host; HostReport or AgentLost follows."""
        agent = self._agents.get(host)
        if self._dial_in or (agent is not None and agent.stream is not None):
            return  # the host has an agent already, or again
        self._started += 1
        launcher = self._launchers.of(host)
        launch = self._launch(host, launcher.is_local)
        try:
            process = launcher.start(launch, self._directory / f"launch-{self._spec.epoch}-{self._started}")
        except OSError as error:
            self._post(t.AgentLost(host, f"could not be started: {error}"))
        else:
            self._agents[host] = self._follow(AgentHandle(host, launch.agent, process, _now()))

    def _launch(self, host: str, here: bool) -> messages.Launch:
        options = self._spec.options
        return messages.Launch(
            host=host,
            agent=secrets.token_hex(8),
            slots=0,
            addresses=self._addresses,
            token=self._token,
            connect_timeout_s=options.connect_timeout_s,
            wait_s=max(CONNECT_TIMEOUT_S, options.connect_timeout_s),  # several attempts, if each is short
            local_address=self._local_address(host, here),
            socket=str(self._directory / f"agent-{self._spec.epoch}-{self._started}") if here else "",
            directory=os.getcwd(),
            job_directory=str(self._directory) if here else "",
            environment=() if here else passed_on(options.env),
        )

    def _local_address(self, host: str, here: bool) -> str:
        """Return the address at which the other hosts reach this host; "": that of its agent's connection."""
        if not self.is_open:
            return names.address_of(host)
        return self._own_address if here else ""

    def expect(self, hosts: Iterable[str]) -> None:
        """Wait for the previous driver's agents to connect. AgentLost follows for each that is known to be dead."""
        options = self._spec.options
        for host in hosts:
            self._started += 1
            if not names.is_this_machine(host) or options.listen is not None:
                continue
            pid, socket = commit_directory.agent_on(options.commit_dir, self._spec.job_id, host)
            try:
                if not pid:
                    raise ProcessLookupError
                process = AdoptedAgent(pid, socket)
            except ProcessLookupError:
                self._tasks.start(self._clear(host, socket))
            else:
                self._agents[host] = self._follow(AgentHandle(host, "", process, _now(), pid=pid))

    async def _clear(self, host: str, socket: str) -> None:
        """Kill what a dead agent has left, then report its end."""
        await in_thread(kill_marked, *agent_variable(socket))
        self._post(t.AgentLost(host, "exited"))

    def _follow(self, agent: AgentHandle) -> AgentHandle:
        self._running.add(agent)
        agent.watcher = self._tasks.start(self._watch(agent))
        return agent

    async def _watch(self, agent: AgentHandle) -> None:
        """Wait until the agent's process has ended, and clean up; on another host, the command that started it."""
        how = await agent.process.ended()
        agent.has_ended = agent.process.is_local
        if not agent.process.is_local and agent.stream is not None:
            agent.process = DialledIn()
            how = await agent.process.ended()
        await agent.process.clear()
        self._lose(agent, how)
        self._running.discard(agent)

    def give_up(self, host: str, reason: str) -> None:
        """Report an expected agent that has not connected as lost."""
        agent = self._agents.get(host)
        if agent is not None:
            self._lose(agent, reason)
        else:
            self._post(t.AgentLost(host, reason, may_live=not names.is_this_machine(host)))

    def check(self) -> None:
        """Raise an unexpected error of a background task."""
        self._tasks.check()

    async def stop(self, reason: str, hurry: asyncio.Event) -> None:
        """End all agents with all their processes; at once when ``hurry`` is set."""
        if self._silence is not None:
            self._silence.cancel()
        for agent in list(self._running):
            self._shut_down(agent, reason)
        await self._all_ended(hurry)
        await self._server.stop()

    async def _all_ended(self, hurry: asyncio.Event) -> None:
        """Wait until all agents, which have received Shutdown, have ended; at once when ``hurry`` is set."""
        watchers = [agent.watcher for agent in self._running if agent.watcher is not None]
        if not watchers:
            return
        gone = asyncio.ensure_future(asyncio.wait(watchers))
        hurried = asyncio.ensure_future(hurry.wait())
        options = self._spec.options
        timeout_s = options.stop_timeout_s + options.heartbeat_timeout_s  # first its workers, then itself
        await asyncio.wait({gone, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for agent in list(self._running):
            agent.process.kill()
        await gone

    # ----------------------------------------------------------------------------------------- messages to the agents

    def is_local(self, host: str) -> bool:
        """Return True if this driver has started the agent of a host as a child on this machine."""
        agent = self._agents.get(host)
        return agent is not None and agent.process.is_local

    def pid_of(self, host: str) -> int | None:
        """Return the process id of a host's agent, as on that host."""
        agent = self._agents.get(host)
        return agent.pid if agent is not None else None

    def send(self, host: str, message: messages.ToAgent) -> bool:
        """Send a message to the agent of a host after all earlier ones. Return False if the agent is lost."""
        agent = self._agents.get(host)
        if agent is None or agent.stream is None:
            return False
        agent.stream.send(message)
        return True

    def broadcast(self, body: messages.ToWorkerBody) -> None:
        """Send a message to all workers of all hosts."""
        self.send_to_all(messages.ToWorkers(None, body))

    def send_to_all(self, message: messages.ToAgent) -> None:
        """Send a message to all connected agents."""
        data = messages.encode(message)
        for agent in self._agents.values():
            if agent.stream is not None:
                agent.stream.write(data)

    def stop_host(self, host: str, reason: str) -> None:
        """Let the agent of a host stop its workers and exit; AgentLost follows."""
        agent = self._agents.get(host)
        if agent is not None:
            self._shut_down(agent, reason)

    def _shut_down(self, agent: AgentHandle, reason: str) -> None:
        agent.is_stopping = True
        if agent.stream is not None:
            agent.stream.send(messages.Shutdown(reason))
        else:
            agent.process.kill()  # it has no workers yet, or is unreachable

    def _ask_for_vote(self, acceptor: str, request: messages.VoteRequest) -> None:
        for agent in self._agents.values():
            if agent.id == acceptor and agent.stream is not None:
                agent.stream.send(request)

    def candidates(self) -> list[Candidate]:
        """Return the agents that can keep the job's record. Those of this machine count as one host."""
        for host in self._agents.keys() - self._own_hosts.keys():
            self._own_hosts[host] = names.is_this_machine(host)
        return [
            Candidate(agent.id, names.LOCALHOST if self._own_hosts[agent.host] else agent.host, agent.rack)
            for agent in self._agents.values()
            if agent.stream is not None and agent.has_reported and not agent.is_stopping and agent.id
        ]

    def host_of(self, acceptor: str) -> str:
        """Return the host of the agent with this identity, or else the identity."""
        return next((agent.host for agent in self._agents.values() if agent.id == acceptor), acceptor)

    # -------------------------------------------------------------------------------------------- lost and back again

    def _lose(self, agent: AgentHandle, reason: str) -> None:
        """Count the agent's workers as lost from now on, and kill them where possible."""
        if agent.is_lost:
            return
        stream, agent.stream = agent.stream, None
        agent.is_lost, agent.since = True, _now()
        if self._agents.get(agent.host) is agent:
            del self._agents[agent.host]
        if agent.is_stopping:
            self._stopped.add(agent.id)
        # With a replicated record, an agent of this machine may have left for a newer driver, too.
        is_ours = agent.process.is_local and not self._votes.is_replicated
        may_live = not is_ours and stream is not None and not agent.is_stopping
        if may_live:
            self._away[agent.id] = agent
        elif not agent.is_stopping or isinstance(agent.process, DialledIn):
            agent.process.kill()
        if stream is not None:
            stream.reset(reason)
        self._report_dialled_in()
        if not agent.is_witness:
            self._post(t.AgentLost(agent.host, reason, may_live))

    def _readmit(self, agent: AgentHandle, replacement: AgentHandle | None) -> AgentHandle:
        """Make an unreachable agent that is back the agent of its host again."""
        if replacement is not None:
            self._dismiss(replacement)
        self._agents[agent.host] = agent
        agent.is_lost = False
        if agent not in self._running:
            agent.process = DialledIn()
            self._follow(agent)
        return agent

    def _adopt(self, agent: AgentHandle | None, hello: messages.AgentHello) -> AgentHandle:
        """Return the handle of an agent that has served a previous driver. ``agent``: current record of its host."""
        if agent is not None and agent.pid == hello.pid and not agent.id:
            agent.id = hello.agent
            return agent
        if agent is not None:
            self._dismiss(agent)
        return self._accept(hello)

    def _accept(self, hello: messages.AgentHello) -> AgentHandle:
        """Follow an agent that this driver has not started."""
        rack = hello.rack if is_host_name(hello.rack) else ""
        agent = AgentHandle(hello.host, hello.agent, DialledIn(), _now(), slots=hello.slots, rack=rack)
        agent.is_witness = self._dial_in and not hello.slots
        self._agents[hello.host] = agent
        return self._follow(agent)

    def _dismiss(self, agent: AgentHandle) -> None:
        """Dismiss the new agent of a host: the previous one is back."""
        agent.is_lost = True
        if agent.stream is not None:
            agent.stream.refuse(f"the previous agent of host {agent.host} has connected again")
            agent.stream = None
        else:
            agent.process.kill()

    def _report_dialled_in(self) -> None:
        if self._dial_in and not self._has_news:
            self._has_news = True
            self._post(t.TimePassed())

    def news(self) -> list[t.Event]:
        """Return the agents that have dialled in, if they have changed: one event for all that arrive together."""
        if not self._has_news:
            return []
        self._has_news = False
        agents = [agent for agent in self._agents.values() if not agent.is_witness]
        racks = {agent.host: agent.rack or self._racks.get(without_case(agent.host), "") for agent in agents}
        slots = {agent.host: 0 if without_case(agent.host) in self._leaving else agent.slots for agent in agents}
        found = (t.HostSlots(agent.host, slots[agent.host], racks[agent.host]) for agent in agents)
        return [t.HostsDiscovered(tuple(found))]

    def discovered(self, hosts: Sequence[t.HostSlots]) -> None:
        """Drain the agents that have dialled in on hosts that discovery names without slots, or does not name any more.

        Discovery may be late: an agent on a host that it has never named may work.
        """
        usable = frozenset(without_case(host.name) for host in hosts if host.slots)
        self._named |= {without_case(host.name) for host in hosts}
        self._leaving = self._named - usable
        self._racks = {without_case(host.name): host.rack for host in hosts}
        self._report_dialled_in()

    # -------------------------------------------------------------------------------------- callbacks of the server

    def agent_joined(self, stream: AgentStream) -> None:
        hello = stream.hello
        if not is_host_name(hello.host):
            self.refused(stream.peer, _BAD_NAME)
            stream.refuse(_BAD_NAME)
            return
        if hello.epoch > self._spec.epoch:
            stream.abort("the agent has a newer driver")
            self._votes.replaced(f"the agent of host {hello.host} has a newer driver")
            return
        agent = self._agents.get(hello.host)
        if agent is not None and agent.id == hello.agent and agent.stream is not None:
            self._lose(agent, "lost its connection and connected again")  # before its silence was detected
            agent = None
        away = self._away.pop(hello.agent, None)
        if away is not None and self._dial_in and agent is not None and agent.has_reported:
            away.process.kill()  # perhaps another machine has its name now
            away = None
        if away is not None:
            agent = self._readmit(away, agent)
        elif 0 < hello.epoch < self._spec.epoch and (agent is None or not agent.has_reported):
            agent = self._adopt(agent, hello)
        elif self._dial_in and agent is None:
            agent = self._accept(hello)
        elif self._dial_in and agent is not None and agent.stream is not None:
            self._tasks.start(self._choose(stream, agent))
            return
        elif agent is None or agent.id != hello.agent or agent.stream is not None:
            self._refuse(stream)
            return
        agent.stream, agent.pid = stream, hello.pid
        stream.send(self._spec)
        self._votes.connected(agent.id)
        self._report_dialled_in()

    def replaced(self, epoch: int, at: str) -> None:
        """Handle the word of a newer driver."""
        if epoch > self._spec.epoch:
            self._votes.replaced(f"the job continues with a newer driver on host {at}")

    def _refuse(self, stream: AgentStream) -> None:
        hello = stream.hello
        reason = f"host {hello.host} does not belong to this job, or has another agent"
        stream.refuse(reason, is_stopped=hello.agent in self._stopped)

    async def _choose(self, rival: AgentStream, agent: AgentHandle) -> None:
        """Admit the second agent of a host if the first one is dead, and refuse it otherwise. The connection of the
        first one seems to live until --heartbeat-timeout, if a pod returns at another address."""
        arrived_at = _now()
        earlier = self._rivals.get(agent.host)
        self._rivals[agent.host] = rival
        if earlier is not None:
            earlier.abort("the agent has dialled in again")
        while self._rivals.get(agent.host) is rival and not agent.is_lost and agent.stream is not None:
            if agent.stream.received_at > arrived_at + _IN_FLIGHT_S:
                self._refuse(rival)
                break
            await asyncio.sleep(_LOOK_INTERVAL_S)
        if self._rivals.get(agent.host) is rival:
            del self._rivals[agent.host]
            if agent.is_lost:
                self.agent_joined(rival)

    def agent_sent(self, stream: AgentStream, message: messages.FromAgent) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is not None and agent.stream is stream:
            if isinstance(message, messages.CouldNotStart):
                self._lose(agent, f"could not start: {message.reason}")
            elif isinstance(message, messages.Vote):
                self._votes.received(agent.id, message)
            elif not isinstance(message, messages.HostReport):
                self._received(agent.host, message)
            else:
                agent.has_reported = True
                if agent.is_witness:
                    self._report_dialled_in()
                else:
                    self._received(agent.host, message)

    def agent_lost(self, stream: AgentStream, reason: str) -> None:
        agent = self._agents.get(stream.hello.host)
        if self._rivals.get(stream.hello.host) is stream:
            del self._rivals[stream.hello.host]
        if agent is not None and agent.stream is stream:  # a process closes its sockets a moment before its end
            asyncio.get_running_loop().call_later(_LAST_MOMENT_S, self._lose_stream, agent, stream, reason)

    def _lose_stream(self, agent: AgentHandle, stream: AgentStream, reason: str) -> None:
        if agent.stream is stream and not agent.has_ended:
            self._lose(agent, f"is unreachable: {reason}")


def _now() -> float:
    return asyncio.get_running_loop().time()
