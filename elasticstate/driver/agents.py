"""The agents of a job: their connections, and the messages to them.

agent_server.py listens for them, agent_starter.py starts and ends their processes, agent_silence.py detects silent
ones. An unreachable agent on another host need not be dead: it may connect again, with its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from elasticstate.core import types as t
from elasticstate.core.ids import without_case
from elasticstate.driver.agent_handle import AgentHandle
from elasticstate.driver.agent_server import AgentServer
from elasticstate.driver.agent_silence import watch_silence
from elasticstate.driver.agent_starter import AgentStarter
from elasticstate.driver.background_tasks import BackgroundTasks
from elasticstate.launchers.dial_in import DialledIn
from elasticstate.net import codec, messages
from elasticstate.net.control import AgentStream
from elasticstate.net.names import address_towards, is_this_machine, outward_address
from elasticstate.net.strangers import Strangers
from elasticstate.options.kinds import is_host_name
from elasticstate.threads import in_thread

_LAST_MOMENT_S = 0.1
_IN_FLIGHT_S = 1.0  # data of an agent that arrives so long after the next one has dialled in was sent after that
_LOOK_INTERVAL_S = 0.05
_RESOLVER_TIMEOUT_S = 2.0
_BAD_NAME = "the agent's host name is invalid. Use letters, digits, dots, dashes and underscores, and no dot first"


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
        strangers: Strangers | None = None,
    ) -> None:
        """``strangers``: the unauthenticated connections of all ports of this process."""
        self._spec = spec
        self._post = post
        self._received = received
        self.status = status
        self._tasks = BackgroundTasks(lambda: post(t.TimePassed()))
        self._server = AgentServer(spec.options, token, self, warn, log, strangers)
        self._starter = AgentStarter(spec, token, directory, self._server, self._tasks, self._lose)
        self._agents: dict[str, AgentHandle] = {}  # current agent of each host
        self._away: dict[str, AgentHandle] = {}  # by id: unreachable, but perhaps alive
        self._stopped: set[str] = set()  # ids of agents that were lost while they stopped
        self._has_news = False  # the agents that have dialled in have changed
        self._rivals: dict[str, AgentStream] = {}  # by host: dialled in while another agent of the host is connected
        self._named: frozenset[str] = frozenset()  # hosts that discovery has named so far, beside agents that dial in
        self._leaving: frozenset[str] = frozenset()  # those of them that it does not name any more
        self._racks: dict[str, str] = {}  # by host, as discovery names them beside agents that dial in
        self._silence: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------- beginning and ending

    def listen(self, ports: tuple[int, ...] = ()) -> None:
        """Listen on the previous driver's ``ports``, or on any. Raises OptionError."""
        self._server.listen(self._spec.job, ports)
        self._silence = self._tasks.start(
            watch_silence(self._spec.options, lambda: list(self._agents.values()), self._lose)
        )

    def open(self) -> None:
        """Listen for other hosts, too. Call this before the first agent is started. Raises OSError."""
        self._server.open()

    async def learn_own_address(self, hosts: Sequence[str]) -> None:
        """Find the address at which these hosts reach this one, for its workers: it may have several."""
        if self._server.is_open and not self._dial_in and any(map(is_this_machine, hosts)):
            try:
                found = await asyncio.wait_for(in_thread(address_towards, hosts), _RESOLVER_TIMEOUT_S)
            except TimeoutError:  # ssh will report the names
                found = outward_address()
            self._starter.own_address = found

    @property
    def _dial_in(self) -> bool:
        return self._spec.options.listen is not None

    @property
    def is_open(self) -> bool:
        """Return True if agents on other hosts can connect."""
        return self._server.is_open

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports where agents connect: of the loopback interface, then of all interfaces."""
        return self._server.ports

    def expect(self, hosts: Iterable[str]) -> None:
        """Wait for the previous driver's agents to connect. AgentLost follows for each that is known to be dead."""
        for host in hosts:
            agent = self._starter.adopt(host, partial(self._post, t.AgentLost(host, "exited")))
            if agent is not None:
                self._agents[host] = agent

    def give_up(self, host: str, reason: str) -> None:
        """Report an expected agent that has not connected as lost."""
        agent = self._agents.get(host)
        if agent is not None:
            self._lose(agent, reason)
        else:
            self._post(t.AgentLost(host, reason, may_live=not is_this_machine(host)))

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or ""."""
        return "" if self._dial_in else self._starter.refuse(host)

    def start(self, host: str) -> None:
        """Start the agent of a host; HostReport or AgentLost follows."""
        agent = self._agents.get(host)
        if self._dial_in or (agent is not None and agent.stream is not None):
            return  # the host has an agent already, or again
        try:
            self._agents[host] = self._starter.start(host)
        except OSError as error:
            self._post(t.AgentLost(host, f"could not be started: {error}"))

    def check(self) -> None:
        """Raise an unexpected error of a background task."""
        self._tasks.check()

    async def stop(self, reason: str, hurry: asyncio.Event) -> None:
        """End all agents with all their processes; at once when ``hurry`` is set."""
        if self._silence is not None:
            self._silence.cancel()
        for agent in list(self._starter.running):
            self._shut_down(agent, reason)
        await self._starter.stop(hurry)
        await self._server.stop()

    # ----------------------------------------------------------------------------------------- messages to the agents

    def pid_of(self, host: str) -> int | None:
        """Return the process id of a host's agent, as on that host."""
        agent = self._agents.get(host)
        return agent.pid if agent is not None else None

    def send(self, host: str, message: messages.ToAgent) -> None:
        """Send a message to the agent of a host after all earlier ones. No effect if the agent is lost."""
        agent = self._agents.get(host)
        if agent is not None and agent.stream is not None:
            agent.stream.send(codec.encode(message))

    def broadcast(self, body: messages.ToWorkerBody) -> None:
        """Send a message to all workers of all hosts."""
        self.send_to_all(messages.ToWorkers(None, body))

    def send_to_all(self, message: messages.ToAgent) -> None:
        """Send a message to all connected agents."""
        data = codec.encode(message)
        for agent in self._agents.values():
            if agent.stream is not None:
                agent.stream.send(data)

    def stop_host(self, host: str, reason: str) -> None:
        """Let the agent of a host stop its workers and exit; AgentLost follows."""
        agent = self._agents.get(host)
        if agent is not None:
            self._shut_down(agent, reason)

    def _shut_down(self, agent: AgentHandle, reason: str) -> None:
        agent.is_stopping = True
        if agent.stream is not None:
            agent.stream.send(codec.encode(messages.Shutdown(reason)))
        else:
            agent.process.kill()  # it has no workers yet, or is unreachable

    # -------------------------------------------------------------------------------------------- lost and back again

    def _lose(self, agent: AgentHandle, reason: str) -> None:
        """Count the agent's workers as lost from now on, and kill them where possible."""
        if agent.is_lost:
            return
        stream, agent.stream = agent.stream, None
        agent.is_lost, agent.since = True, asyncio.get_running_loop().time()
        if self._agents.get(agent.host) is agent:
            del self._agents[agent.host]
        if agent.is_stopping:
            self._stopped.add(agent.id)
        may_live = not agent.process.is_local and stream is not None and not agent.is_stopping
        if may_live:
            self._away[agent.id] = agent
        elif not agent.is_stopping or isinstance(agent.process, DialledIn):
            agent.process.kill()
        if stream is not None:
            stream.reset(reason)
        self._report_dialled_in()
        self._post(t.AgentLost(agent.host, reason, may_live))

    def _readmit(self, agent: AgentHandle, replacement: AgentHandle | None) -> AgentHandle:
        """Make an unreachable agent that is back the agent of its host again."""
        if replacement is not None:
            self._dismiss(replacement)
        self._agents[agent.host] = agent
        agent.is_lost = False
        if agent not in self._starter.running:
            agent.process = DialledIn()
            self._starter.follow(agent)
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
        agent = self._agents[hello.host] = self._starter.accept(hello.host, hello.agent, hello.slots)
        agent.rack = hello.rack if is_host_name(hello.rack) else ""
        return agent

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
        agents = self._agents.values()
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
        stream.send(codec.encode(self._spec))
        self._report_dialled_in()

    def _refuse(self, stream: AgentStream) -> None:
        hello = stream.hello
        reason = f"host {hello.host} does not belong to this job, or has another agent"
        stream.refuse(reason, is_stopped=hello.agent in self._stopped)

    async def _choose(self, rival: AgentStream, agent: AgentHandle) -> None:
        """Admit the second agent of a host if the first one is dead, and refuse it otherwise.

        A pod that returns at another address has its old name. The connection of its last agent seems to live until
        --heartbeat-timeout, if the node was lost.
        """
        arrived_at = asyncio.get_running_loop().time()
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
            if isinstance(message, messages.HostReport):
                agent.has_reported = True
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

    def refused(self, peer: str, reason: str) -> None:
        self._server.refused(peer, reason)
