"""The agents of a job: starts them, exchanges messages with them, watches them, and ends them with all their processes.

An unreachable agent on another host need not be dead: it may dial in again, with its workers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from elasticstate import commits as commit_directory
from elasticstate.config import Options, agent_variable, passed_on
from elasticstate.core import types as t
from elasticstate.driver import launcher
from elasticstate.driver.agent_handle import AgentHandle
from elasticstate.driver.launcher import AdoptedAgent, DialledIn
from elasticstate.errors import OptionError
from elasticstate.kinds import is_host_name, split_address
from elasticstate.net import codec, messages
from elasticstate.net.control import SILENT_SHARE, AgentStream, ControlServer
from elasticstate.net.launch import Launch
from elasticstate.net.names import LOCALHOST, address_of, is_this_machine, own_addresses
from elasticstate.net.trust import Trust
from elasticstate.processes import kill_marked
from elasticstate.threads import in_thread

_LOOKS_PER_TIMEOUT = 20  # checks for silent agents within --heartbeat-timeout
_LOOKS_PER_HEARTBEAT = 5  # a heartbeat to each agent at every 5th check only, because it costs more
_LONGEST_INTERVAL_S = 1.0
_LAST_MOMENT_S = 0.1
_BAD_NAME = "its name is not a host name: letters, digits, dots, dashes and underscores, no dot first"
_REFUSALS_SAID = 5  # of one kind, each with a line of its own


class Agents:
    """The agents of a job. ``post`` gets AgentLost, ``received(host, message)`` each message, HostReport first."""

    def __init__(
        self,
        spec: messages.JobSpec,
        options: Options,
        token: str,
        directory: Path,
        post: Callable[[t.Event], None],
        received: Callable[[str, messages.FromAgent], None],
        status: Callable[[], str],
        warn: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._token = token
        self._options = options
        self._directory = directory
        self._post = post
        self._received = received
        self.status = status
        self._warn = warn
        self._say = say
        self._server = ControlServer(Trust(token), options.connect_timeout_s, self)
        self._loop = asyncio.get_running_loop()
        self._agents: dict[str, AgentHandle] = {}  # current agent of each host
        self._away: dict[str, AgentHandle] = {}  # by id: unreachable, but perhaps alive
        self._processes: set[AgentHandle] = set()  # agents whose process lives, or is not cleaned up yet
        self._clearing: list[asyncio.Task[None]] = []  # cleanup after dead agents
        self._refusals: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._started = 0
        self.is_open = False
        self._has_news = False  # the agents that have dialled in have changed
        self._silence: asyncio.Task[None] | None = None

    def listen(self, ports: tuple[int, ...] = ()) -> None:
        """Listen on the previous driver's ``ports``, or on any. Raises OptionError."""
        if self._options.listen is not None:
            self._await_agents(*split_address(self._options.listen))
        try:
            self.ports: tuple[int, ...] = (self._server.listen(LOCALHOST, *ports[:1]),)
            self._addresses: tuple[str, ...] = (f"{LOCALHOST}:{self.ports[0]}",)
            if ports[1:]:
                self.open(ports[1])
        except OSError as error:
            raise OptionError(f"--job-name: its agents dial {LOCALHOST}, ports {ports}: {error.strerror}") from None
        self._silence = self._start(self._watch_silence())

    def _await_agents(self, host: str, port: int) -> None:
        """Listen for agents that dial in (``--listen``): each of them is a host. Raises OptionError."""
        try:
            port = self._server.listen(host, port)
        except OSError as error:
            raise OptionError(
                f"--listen: {self._options.listen!r}: {error.strerror}. Give an address of this machine and a free port"
            ) from None
        self.is_open = True
        shown = host if host not in ("0.0.0.0", "::") else next(iter(own_addresses()), LOCALHOST)
        self._say(
            f"waits for agents: on each host run elasticrun agent --join {shown}:{port} "
            f"--token-file {self._options.token_file}"
        )

    def open(self, port: int = 0) -> None:
        """Listen for other hosts, too. Call this before the first agent is started. Raises OSError."""
        port = self._server.listen("0.0.0.0", port)
        self.ports = (self.ports[0], port)
        self._addresses = tuple(f"{address}:{port}" for address in (*own_addresses(), LOCALHOST))
        self.is_open = True

    def expect(self, hosts: Iterable[str]) -> None:
        """Wait for the previous driver's agents to dial in. AgentLost follows for each that is known to be dead."""
        for host in hosts:
            self._started += 1
            if not is_this_machine(host) or self._options.listen is not None:
                continue
            pid, socket = commit_directory.agent_on(self._options.commit_dir, self._spec.job_id, host)
            try:
                if not pid:
                    raise ProcessLookupError
                agent = self._agents[host] = AgentHandle(
                    host, "", AdoptedAgent(pid, socket), self._loop.time(), pid=pid
                )
                self._follow(agent)
            except ProcessLookupError:
                self._clearing.append(self._start(self._clear(host, socket)))

    async def _clear(self, host: str, socket: str) -> None:
        await in_thread(kill_marked, *agent_variable(socket))
        self._post(t.AgentLost(host, "has ended"))

    def give_up(self, host: str, reason: str) -> None:
        """Report an expected agent that has not dialled in as lost."""
        agent = self._agents.get(host)
        if agent is not None:
            self._lose(agent, reason)
        else:
            self._post(t.AgentLost(host, reason, may_live=not is_this_machine(host)))

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or ""."""
        if reason := launcher.refuse(host):
            return reason
        if is_this_machine(host) or self.is_open or not self._started:
            return ""
        return (
            f"host {host!r} is not this machine, and all that there were when the job began are: its workers "
            "listen on the loopback interface only, and the new ones could not reach them"
        )

    def start(self, host: str) -> None:
        """Start the agent of a host; HostReport or AgentLost follows."""
        agent = self._agents.get(host)
        if self._options.listen is not None or (agent is not None and agent.stream is not None):
            return  # the host has an agent already, or again
        self._started += 1
        launch = self._launch(host)
        try:
            process = launcher.start(launch, self._options, self._directory / f"ssh-{self._spec.epoch}-{self._started}")
        except OSError as error:
            self._post(t.AgentLost(host, f"cannot be started: {error}"))
            return
        agent = self._agents[host] = AgentHandle(host, launch.agent, process, self._loop.time())
        self._follow(agent)

    def _launch(self, host: str) -> Launch:
        here = is_this_machine(host)
        return Launch(
            host=host,
            agent=secrets.token_hex(8),
            slots=0,
            addresses=self._addresses,
            token=self._token,
            connect_timeout_s=self._options.connect_timeout_s,
            wait_s=self._options.connect_timeout_s,
            local_address="" if self.is_open else address_of(host),
            socket=str(self._directory / f"agent-{self._spec.epoch}-{self._started}") if here else "",
            directory=os.getcwd(),
            job_directory=str(self._directory) if here else "",
            environment=() if here else passed_on(self._options.env),
        )

    def pid_of(self, host: str) -> int | None:
        """Return the process id of a host's agent, as on that host."""
        agent = self._agents.get(host)
        return agent.pid if agent is not None else None

    def send(self, host: str, message: messages.ToAgent) -> None:
        """Send a message to the agent of a host after all earlier ones. No effect if the agent is lost."""
        agent = self._agents.get(host)
        if agent is not None and agent.stream is not None:
            agent.stream.send(codec.encode(message))

    def stop_host(self, host: str, reason: str) -> None:
        """Let the agent of a host stop its workers and exit; AgentLost follows."""
        agent = self._agents.get(host)
        if agent is not None:
            self._shut_down(agent, reason)

    def broadcast(self, body: messages.ToWorkerBody) -> None:
        """Send a message to all workers of all hosts."""
        data = codec.encode(messages.ToWorkers(None, body))
        for agent in self._agents.values():
            if agent.stream is not None:
                agent.stream.send(data)

    async def stop(self, reason: str, hurry: asyncio.Event) -> None:
        """End all agents with all their processes; at once when ``hurry`` is set."""
        if self._silence is not None:
            self._silence.cancel()
        for agent in list(self._processes):
            self._shut_down(agent, reason)
        watchers = [agent.watcher for agent in self._processes if agent.watcher is not None]
        if watchers:
            gone = asyncio.ensure_future(asyncio.wait(watchers))
            hurried = asyncio.ensure_future(hurry.wait())
            timeout_s = self._spec.stop_timeout_s + self._spec.heartbeat_timeout_s  # first its workers, then itself
            await asyncio.wait({gone, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            for agent in list(self._processes):
                agent.process.kill()
            await gone
        await self._server.stop()

    def _shut_down(self, agent: AgentHandle, reason: str) -> None:
        agent.is_stopping = True
        if agent.stream is not None:
            agent.stream.send(codec.encode(messages.Shutdown(reason)))
        else:
            agent.process.kill()  # it has no workers yet, or is unreachable

    # ------------------------------------------------------------------------------------------ watching the agents

    def _follow(self, agent: AgentHandle) -> None:
        self._processes.add(agent)
        agent.watcher = self._start(self._watch(agent))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._post(t.TimePassed())

    def check(self) -> None:
        """Raise an unexpected error of a background task: a driver that no longer watches must not keep running."""
        if self._failure is not None:
            raise self._failure

    async def _watch(self, agent: AgentHandle) -> None:
        """Wait until the agent's process has ended; on another host, the ssh connection that started it."""
        how = await agent.process.ended()
        agent.has_ended = agent.process.is_local
        if not agent.process.is_local and agent.stream is not None:
            agent.process = DialledIn()
            how = await agent.process.ended()
        await agent.process.clear()
        self._lose(agent, how)
        self._processes.discard(agent)

    async def _watch_silence(self) -> None:
        """Count silent agents as lost, even if their process lives. Send heartbeats, so that agents can do likewise."""
        interval_s = min(_LONGEST_INTERVAL_S, self._spec.heartbeat_timeout_s / _LOOKS_PER_TIMEOUT)
        looked_at = self._loop.time()
        forgiven_until = looked_at
        looks = 0
        while True:
            await asyncio.sleep(interval_s)
            now = self._loop.time()
            stalled_s = now - looked_at - interval_s
            looked_at = now
            looks += 1
            if stalled_s > _LONGEST_INTERVAL_S:  # this driver was stopped, and the agents may have been, too
                forgiven_until = now
            for agent in list(self._agents.values()):
                if agent.stream is not None:
                    if looks % _LOOKS_PER_HEARTBEAT == 0:
                        agent.stream.heartbeat()
                    limit_s = SILENT_SHARE * self._spec.heartbeat_timeout_s
                    if now - max(agent.stream.heard_at, forgiven_until) > limit_s:
                        self._lose(agent, f"was silent for {limit_s:g} s")
                elif now - max(agent.since, forgiven_until) > self._spec.start_timeout_s:
                    self._lose(agent, f"was not connected within {self._spec.start_timeout_s:g} s")

    def _lose(self, agent: AgentHandle, reason: str) -> None:
        """Count the agent's workers as lost from now on, and kill them where possible."""
        if agent.is_lost:
            return
        stream, agent.stream = agent.stream, None
        agent.is_lost, agent.since = True, self._loop.time()
        if self._agents.get(agent.host) is agent:
            del self._agents[agent.host]
        may_live = not agent.process.is_local and stream is not None and not agent.is_stopping
        if may_live:
            self._away[agent.id] = agent
        elif not agent.is_stopping or isinstance(agent.process, DialledIn):
            agent.process.kill()
        if stream is not None:
            stream.reset(reason)
        self._say_who_has_dialled_in()
        self._post(t.AgentLost(agent.host, reason, may_live))

    # -------------------------------------------------------------------------------------- callbacks of the server

    def agent_joined(self, stream: AgentStream) -> None:
        hello = stream.hello
        if not is_host_name(hello.host):
            self.refused(stream.peer, _BAD_NAME)
            stream.refuse(_BAD_NAME)
            return
        agent = self._agents.get(hello.host)
        if agent is not None and agent.id == hello.agent and agent.stream is not None:
            self._lose(agent, "is out of touch: it has dialled again")  # before its silence was detected
            agent = None
        back = self._away.pop(hello.agent, None)
        if back is not None:
            if agent is not None:
                self._send_away(agent)
            agent = self._agents[hello.host] = back
            agent.is_lost = False
            if agent not in self._processes:
                agent.process = DialledIn()
                self._follow(agent)
        elif 0 < hello.epoch < self._spec.epoch and (agent is None or agent.stream is None):
            agent = self._adopt(agent, hello)
        elif self._options.listen is not None and agent is None:
            agent = self._agents[hello.host] = AgentHandle(hello.host, hello.agent, DialledIn(), self._loop.time())
            agent.slots = hello.slots
            self._follow(agent)
        elif agent is None or agent.id != hello.agent or agent.stream is not None:
            stream.refuse(f"{hello.host} is no host of this job, or has another agent")
            return
        agent.stream, agent.pid = stream, hello.pid
        stream.send(codec.encode(self._spec))
        self._say_who_has_dialled_in()

    def _adopt(self, agent: AgentHandle | None, hello: messages.AgentHello) -> AgentHandle:
        """Return the handle of an agent that has served a previous driver. ``agent``: current record of its host."""
        if agent is not None and agent.pid == hello.pid and not agent.id:
            agent.id = hello.agent
            return agent
        if agent is not None:
            self._send_away(agent)
        agent = self._agents[hello.host] = AgentHandle(hello.host, hello.agent, DialledIn(), self._loop.time())
        agent.slots = hello.slots
        self._follow(agent)
        return agent

    def _send_away(self, agent: AgentHandle) -> None:
        """Dismiss the new agent of a host: the agent that it was to replace is back."""
        agent.is_lost = True
        if agent.stream is not None:
            agent.stream.refuse(f"the agent before it is back on {agent.host}")
            agent.stream = None
        else:
            agent.process.kill()

    def _say_who_has_dialled_in(self) -> None:
        if self._options.listen is not None and not self._has_news:
            self._has_news = True
            self._post(t.TimePassed())

    def news(self) -> list[t.Event]:
        """Return the agents that have dialled in, if they have changed: one event for all that arrive together."""
        if not self._has_news:
            return []
        self._has_news = False
        hosts = (t.HostSlots(agent.host, agent.slots) for agent in self._agents.values())
        return [t.HostsDiscovered(tuple(hosts))]

    def agent_said(self, stream: AgentStream, message: messages.FromAgent) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is not None and agent.stream is stream:
            self._received(agent.host, message)

    def agent_gone(self, stream: AgentStream, reason: str) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is not None and agent.stream is stream:  # a process closes its sockets a moment before its end
            self._loop.call_later(_LAST_MOMENT_S, self._lose_stream, agent, stream, reason)

    def _lose_stream(self, agent: AgentHandle, stream: AgentStream, reason: str) -> None:
        if agent.stream is stream and not agent.has_ended:
            self._lose(agent, f"is out of touch: {reason}")

    def refused(self, peer: str, reason: str) -> None:
        """Warn of a refused connection. The same reason again and again is logged only now and then."""
        count = self._refusals[reason] = self._refusals.get(reason, 0) + 1
        if count <= _REFUSALS_SAID or count & (count - 1) == 0:
            times = f" ({count} times by now)" if count > _REFUSALS_SAID else ""
            self._warn(f"refused a connection from {peer}: {reason}{times}")
