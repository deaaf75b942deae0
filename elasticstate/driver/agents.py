"""The agents of a job: started, spoken with, watched, and ended with all that is theirs.

An agent on another host that is out of touch is not known to be dead: it may dial in again, with its workers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from elasticstate import commits as commit_directory
from elasticstate.config import Options, passed_on, socket_variable
from elasticstate.core import types as t
from elasticstate.driver import launcher
from elasticstate.driver.launcher import AdoptedAgent, AgentProcess, DialledIn
from elasticstate.errors import OptionError
from elasticstate.kinds import split_address
from elasticstate.net import codec, messages
from elasticstate.net.control import SILENT_SHARE, AgentStream, ControlServer
from elasticstate.net.launch import Launch
from elasticstate.net.names import LOCALHOST, address_of, is_this_machine, own_addresses
from elasticstate.net.trust import Trust
from elasticstate.processes import allow_many_descriptors, kill_marked

_LOOKS_PER_TIMEOUT = 20  # at who is silent, within --heartbeat-timeout
_LOOKS_PER_BEAT = 5  # for each agent to hear from the driver: that costs more
_LONGEST_INTERVAL_S = 1.0
_LAST_MOMENT_S = 0.1
_REFUSALS_SAID = 5  # of one kind, each by itself


@dataclass(slots=True, eq=False)
class _Agent:
    host: str
    id: str
    process: AgentProcess
    since: float  # started, or lost
    stream: AgentStream | None = None
    pid: int | None = None
    slots: int = 0  # of one that has dialled in
    watcher: asyncio.Task[None] | None = None
    is_stopping: bool = False  # was told to shut down
    is_lost: bool = False


class Agents:
    """``post`` gets AgentLost, ``received(host, message)`` all that an agent says, Serving first."""

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
        self._agents: dict[str, _Agent] = {}  # the present one of each host
        self._away: dict[str, _Agent] = {}  # by id: out of touch, and perhaps alive
        self._processes: set[_Agent] = set()  # whose process lives, or has not been cleared up
        self._refusals: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._started = 0
        self.is_open = False
        self._has_news = False  # others have dialled in than the driver was told
        self._silence: asyncio.Task[None] | None = None

    def listen(self, ports: tuple[int, ...] = ()) -> None:
        """Where the driver before this one was found (``ports``), or anywhere. Raises OptionError."""
        try:
            self.ports: tuple[int, ...] = (self._server.listen(LOCALHOST, *ports[:1]),)
            self._addresses: tuple[str, ...] = (f"{LOCALHOST}:{self.ports[0]}",)
            if ports[1:]:
                self.open(ports[1])
        except OSError as error:
            raise OptionError(f"--job-name: its agents dial {LOCALHOST}, ports {ports}: {error.strerror}") from None
        self._silence = asyncio.ensure_future(self._watch_silence())
        self._silence.add_done_callback(self._note_failure)
        if self._options.listen is not None:
            self._await_agents(*split_address(self._options.listen))

    def _await_agents(self, host: str, port: int) -> None:
        """``--listen``: whoever dials in is a host."""
        allow_many_descriptors()
        port = self._server.listen(host, port)
        self.is_open = True
        shown = host if host not in ("0.0.0.0", "::") else next(iter(own_addresses()), LOCALHOST)
        self._say(
            f"waits for agents: on each host run elasticrun agent --join {shown}:{port} "
            f"--token-file {self._options.token_file}"
        )

    def open(self, port: int = 0) -> None:
        """Listen for other hosts, too: before the first agent is started. Raises OSError."""
        allow_many_descriptors()
        port = self._server.listen("0.0.0.0", port)
        self.ports = (self.ports[0], port)
        self._addresses = tuple(f"{address}:{port}" for address in (*own_addresses(), LOCALHOST))
        self.is_open = True

    def expect(self, hosts: Iterable[str]) -> None:
        """The agents that a driver before this one had there dial in. AgentLost follows for those known to be gone."""
        for host in hosts:
            self._started += 1
            if not is_this_machine(host) or self._options.listen is not None:
                continue
            pid, socket = commit_directory.agent_on(self._options.commit_dir, self._spec.job_id, host)
            try:
                if not pid:
                    raise ProcessLookupError
                agent = self._agents[host] = _Agent(host, "", AdoptedAgent(pid, socket), self._loop.time(), pid=pid)
                self._follow(agent)
            except ProcessLookupError:
                kill_marked(*socket_variable(socket))
                self._post(t.AgentLost(host, "has ended"))

    def give_up(self, host: str, reason: str) -> None:
        """An agent that was expected and has not come."""
        agent = self._agents.get(host)
        if agent is not None:
            self._lose(agent, reason)
        else:
            self._post(t.AgentLost(host, reason, may_live=not is_this_machine(host)))

    def refuse(self, host: str) -> str:
        """Why no agent can be started on a host; "" when one can."""
        if reason := launcher.refuse(host):
            return reason
        if is_this_machine(host) or self.is_open or not self._started:
            return ""
        return (
            f"host {host!r} is not this machine, and all that there were when the job began are: its workers "
            "listen on the loopback interface only, and the new ones could not reach them"
        )

    def start(self, host: str) -> None:
        """Start the agent of a host; Serving or AgentLost follows."""
        agent = self._agents.get(host)
        if self._options.listen is not None or (agent is not None and agent.stream is not None):
            return  # it is here already, or again
        self._started += 1
        launch = self._launch(host)
        try:
            process = launcher.start(launch, self._options, self._directory / f"ssh-{self._spec.epoch}-{self._started}")
        except OSError as error:
            self._post(t.AgentLost(host, f"cannot be started: {error}"))
            return
        agent = self._agents[host] = _Agent(host, launch.agent, process, self._loop.time())
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
        """The process id of a host's agent, as it is on that host."""
        agent = self._agents.get(host)
        return agent.pid if agent is not None else None

    def send(self, host: str, message: messages.ToAgent) -> None:
        """Send to the agent of a host, after all that it was sent before; without effect when it is lost."""
        agent = self._agents.get(host)
        if agent is not None and agent.stream is not None:
            agent.stream.send(codec.encode(message))

    def stop_host(self, host: str, reason: str) -> None:
        """Let the agent of a host stop its workers and exit; AgentLost follows."""
        agent = self._agents.get(host)
        if agent is not None:
            self._shut_down(agent, reason)

    def broadcast(self, body: messages.ToWorkerBody) -> None:
        """Send to every worker of every host."""
        data = codec.encode(messages.ToWorkers(None, body))
        for agent in self._agents.values():
            if agent.stream is not None:
                agent.stream.send(data)

    async def stop(self, reason: str, hurry: asyncio.Event) -> None:
        """End all agents and all that is theirs; at once when ``hurry`` is set."""
        if self._silence is not None:
            self._silence.cancel()
        for agent in list(self._processes):
            self._shut_down(agent, reason)
        watchers = [agent.watcher for agent in self._processes if agent.watcher is not None]
        if watchers:
            gone = asyncio.ensure_future(asyncio.wait(watchers))
            hurried = asyncio.ensure_future(hurry.wait())
            timeout_s = self._spec.stop_timeout_s + self._spec.heartbeat_timeout_s  # its workers, and then itself
            await asyncio.wait({gone, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            for agent in list(self._processes):
                agent.process.kill()
            await gone
        await self._server.stop()

    def _shut_down(self, agent: _Agent, reason: str) -> None:
        agent.is_stopping = True
        if agent.stream is not None:
            agent.stream.send(codec.encode(messages.Shutdown(reason)))
        else:
            agent.process.kill()  # it has no workers yet, or is out of touch

    # ------------------------------------------------------------------------------------------------ how they fare

    def _follow(self, agent: _Agent) -> None:
        self._processes.add(agent)
        agent.watcher = asyncio.ensure_future(self._watch(agent))
        agent.watcher.add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._post(t.TimePassed())

    def check(self) -> None:
        """Raise what nobody has foreseen: a driver that does not watch any more must not seem to."""
        if self._failure is not None:
            raise self._failure

    async def _watch(self, agent: _Agent) -> None:
        """Until the process has ended. That of another host's agent is but the connection that has started it."""
        how = await agent.process.ended()
        if not agent.process.is_local and agent.stream is not None:
            agent.process = DialledIn()
            how = await agent.process.ended()
        self._lose(agent, how)
        agent.process.kill()  # what it left
        self._processes.discard(agent)

    async def _watch_silence(self) -> None:
        """Who says nothing is as good as dead, even if its process lives. So that the agents can say as much: beats."""
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
                    if looks % _LOOKS_PER_BEAT == 0:
                        agent.stream.beat()
                    limit_s = SILENT_SHARE * self._spec.heartbeat_timeout_s
                    if now - max(agent.stream.heard_at, forgiven_until) > limit_s:
                        self._lose(agent, f"was silent for {limit_s:g} s")
                elif now - max(agent.since, forgiven_until) > self._spec.start_timeout_s:
                    self._lose(agent, f"was not connected within {self._spec.start_timeout_s:g} s")

    def _lose(self, agent: _Agent, reason: str) -> None:
        """Its workers count as lost from now on: where they can be ended, they are."""
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

    # ------------------------------------------------------------------------------------- what the server tells of

    def agent_joined(self, stream: AgentStream) -> None:
        hello = stream.hello
        agent = self._agents.get(hello.host)
        if agent is not None and agent.id == hello.agent and agent.stream is not None:
            self._lose(agent, "is out of touch: it has dialled again")  # before it was missed
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
            agent = self._take_over(agent, hello)
        elif self._options.listen is not None and agent is None:
            agent = self._agents[hello.host] = _Agent(hello.host, hello.agent, DialledIn(), self._loop.time())
            agent.slots = hello.slots
            self._follow(agent)
        elif agent is None or agent.id != hello.agent or agent.stream is not None:
            stream.refuse(f"{hello.host} is no host of this job, or has another agent")
            return
        agent.stream, agent.pid = stream, hello.pid
        stream.send(codec.encode(self._spec))
        self._say_who_has_dialled_in()

    def _take_over(self, agent: _Agent | None, hello: messages.AgentHello) -> _Agent:
        """It has served a driver before this one; ``agent`` is what is known of its host."""
        if agent is not None and agent.pid == hello.pid and not agent.id:
            agent.id = hello.agent
            return agent
        if agent is not None:
            self._send_away(agent)
        agent = self._agents[hello.host] = _Agent(hello.host, hello.agent, DialledIn(), self._loop.time())
        agent.slots = hello.slots
        self._follow(agent)
        return agent

    def _send_away(self, agent: _Agent) -> None:
        """It is not needed: the agent that it was to replace is back."""
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
        """Who has dialled in, if that has changed since the last call: once for all who come at the same time."""
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
        if agent is not None and agent.stream is stream:  # the sockets of a process close a moment before it has ended
            self._loop.call_later(_LAST_MOMENT_S, self._lose_stream, agent, stream, reason)

    def _lose_stream(self, agent: _Agent, stream: AgentStream, reason: str) -> None:
        if agent.stream is stream:
            self._lose(agent, f"is out of touch: {reason}")

    def refused(self, peer: str, reason: str) -> None:
        """Say who, and why; when it is the same again and again, only now and then."""
        count = self._refusals[reason] = self._refusals.get(reason, 0) + 1
        if count <= _REFUSALS_SAID or count & (count - 1) == 0:
            times = f" ({count} times by now)" if count > _REFUSALS_SAID else ""
            self._warn(f"refused a connection from {peer}: {reason}{times}")
