"""The agents of a job: started, spoken with, watched, and ended with all that is theirs."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticstate.core import types as t
from elasticstate.driver.launcher import LocalAgent
from elasticstate.net import messages
from elasticstate.net.names import address_of
from elasticstate.net.rpc import AgentStream, ControlServer

_WATCH_INTERVAL_S = 0.5
_LAST_MOMENT_S = 0.1
_EXIT_TIMEOUT_S = 5.0  # for an agent, after the time that its workers may take


@dataclass(slots=True, eq=False)
class _Agent:
    host: str
    process: LocalAgent
    heard_at: float
    stream: AgentStream | None = None
    watcher: asyncio.Task[None] | None = None
    is_stopping: bool = False  # was told to shut down
    is_lost: bool = False


class Agents:
    """``post`` gets AgentLost, ``received(host, message)`` all that an agent says, Serving first."""

    def __init__(
        self,
        spec: messages.JobSpec,
        directory: Path,
        post: Callable[[t.Event], None],
        received: Callable[[str, messages.FromAgent], None],
        status: Callable[[], str],
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self._spec = spec
        self._directory = directory
        self._post = post
        self._received = received
        self._server = ControlServer(self.token, self._joined, self._from_stream, self._stream_lost, status)
        self._loop = asyncio.get_running_loop()
        self._agents: dict[str, _Agent] = {}  # the present one of each host
        self._processes: set[_Agent] = set()  # whose process lives, or has not been cleared up
        self._started = 0
        self._silence: asyncio.Task[None] | None = None

    async def listen(self) -> str:
        """Returns the address for agents and ``elasticrun status``."""
        self._address = await self._server.start()
        self._silence = asyncio.ensure_future(self._watch_silence())
        return self._address

    def start(self, host: str) -> None:
        """Start the agent of a host; Serving or AgentLost follows."""
        self._started += 1
        launch = messages.Launch(
            host=host,
            address=self._address,
            token=self.token,
            local_address=address_of(host),
            socket=str(self._directory / f"agent-{self._started}"),
            directory=os.getcwd(),
            job_directory=str(self._directory),
        )
        try:
            process = LocalAgent(launch)
        except OSError as error:
            self._post(t.AgentLost(host, f"cannot be started: {error}"))
            return
        agent = self._agents[host] = _Agent(host, process, self._loop.time())
        self._processes.add(agent)
        agent.watcher = asyncio.ensure_future(self._watch(agent))

    def pid_of(self, host: str) -> int | None:
        """The process id of a host's agent."""
        agent = self._agents.get(host)
        return agent.process.pid if agent is not None else None

    def send(self, host: str, message: messages.ToAgent) -> None:
        """Send to the agent of a host, after all that it was sent before; without effect when it is lost."""
        agent = self._agents.get(host)
        if agent is not None and agent.stream is not None:
            agent.stream.send(messages.encode(message))

    def stop_host(self, host: str, reason: str) -> None:
        """Let the agent of a host stop its workers and exit; AgentLost follows."""
        agent = self._agents.get(host)
        if agent is not None:
            self._shut_down(agent, reason)

    def broadcast(self, body: messages.ToWorkerBody) -> None:
        """Send to every worker of every host."""
        data = messages.encode(messages.ToWorkers(None, body))
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
            timeout_s = self._spec.stop_timeout_s + _EXIT_TIMEOUT_S
            await asyncio.wait({gone, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            for agent in list(self._processes):
                agent.process.kill()
            await gone
        await self._server.stop()

    def _shut_down(self, agent: _Agent, reason: str) -> None:
        agent.is_stopping = True
        if agent.stream is not None:
            agent.stream.send(messages.encode(messages.Shutdown(reason)))
        else:
            agent.process.kill()  # it has no workers yet

    # ------------------------------------------------------------------------------------------------ how they fare

    async def _watch(self, agent: _Agent) -> None:
        """Until the process has ended."""
        how = await agent.process.ended()
        self._lose(agent, how)
        agent.process.kill()  # what it left
        self._processes.discard(agent)

    async def _watch_silence(self) -> None:
        """An agent says something twice a second. One that does not is as good as dead, even if its process lives."""
        looked_at = self._loop.time()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = self._loop.time()
            stalled_s = now - looked_at - _WATCH_INTERVAL_S
            looked_at = now
            for agent in list(self._agents.values()):
                if stalled_s > _WATCH_INTERVAL_S:
                    agent.heard_at += stalled_s  # this driver was stopped, and the agents may have been, too
                limit_s = self._spec.heartbeat_timeout_s if agent.stream is not None else self._spec.start_timeout_s
                if now - agent.heard_at > limit_s:
                    self._lose(agent, f"was silent for {limit_s:g} s")

    def _lose(self, agent: _Agent, reason: str) -> None:
        """Its workers count as dead from now on: make that true."""
        if agent.is_lost:
            return
        agent.is_lost = True
        agent.stream = None
        if self._agents.get(agent.host) is agent:
            del self._agents[agent.host]
        if not agent.is_stopping:
            agent.process.kill()
        self._post(t.AgentLost(agent.host, reason))

    # ------------------------------------------------------------------------------------------------- their streams

    def _joined(self, stream: AgentStream) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is None or agent.process.pid != stream.hello.pid or agent.stream is not None:
            stream.send(messages.encode(messages.Shutdown("is no agent of this job")))
            return
        agent.stream = stream
        agent.heard_at = self._loop.time()
        stream.send(messages.encode(self._spec))

    def _from_stream(self, stream: AgentStream, message: messages.FromAgent) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is None or agent.stream is not stream:
            return
        agent.heard_at = self._loop.time()
        self._received(agent.host, message)

    def _stream_lost(self, stream: AgentStream, reason: str) -> None:
        agent = self._agents.get(stream.hello.host)
        if agent is not None and agent.stream is stream:  # the sockets of a process close a moment before it has ended
            self._loop.call_later(_LAST_MOMENT_S, self._lose, agent, reason)
