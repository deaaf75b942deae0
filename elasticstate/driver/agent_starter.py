"""Start of agents, and their processes until they have ended."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from elasticstate import commits as commit_directory
from elasticstate.driver.agent_handle import AgentHandle
from elasticstate.driver.agent_server import AgentServer
from elasticstate.driver.background_tasks import BackgroundTasks
from elasticstate.launchers import HostLaunchers
from elasticstate.launchers.dial_in import DialledIn
from elasticstate.launchers.local import AdoptedAgent
from elasticstate.net.launch import Launch
from elasticstate.net.messages import JobSpec
from elasticstate.net.names import address_of, is_this_machine
from elasticstate.options import CONNECT_TIMEOUT_S, Options, agent_variable, passed_on
from elasticstate.processes import kill_marked
from elasticstate.threads import in_thread


class AgentStarter:
    """Starter of agents. ``ended(agent, how)`` is called when the process of an agent has ended and is cleaned up."""

    def __init__(
        self,
        spec: JobSpec,
        token: str,
        directory: Path,
        server: AgentServer,
        tasks: BackgroundTasks,
        ended: Callable[[AgentHandle, str], None],
    ) -> None:
        self._spec = spec
        self._token = token
        self._directory = directory
        self._server = server
        self._tasks = tasks
        self._ended = ended
        self._launchers = HostLaunchers(spec.options)
        self._started = 0
        self.own_address = ""  # at which the other hosts reach this one; empty: not known
        self.running: set[AgentHandle] = set()  # agents whose process lives, or is not cleaned up yet

    @property
    def _options(self) -> Options:
        return self._spec.options

    def refuse(self, host: str) -> str:
        """Return why no agent can be started on a host, or ""."""
        if reason := self._launchers.refuse(host):
            return reason
        if is_this_machine(host) or self._server.is_open or not self._started:
            return ""
        return (
            f"host {host!r} is another machine, but all hosts of the job were this machine when the job started. Its "
            "workers listen on the loopback interface, which another machine cannot reach"
        )

    def start(self, host: str) -> AgentHandle:
        """Start the agent of a host. Raises OSError if that fails."""
        self._started += 1
        launcher = self._launchers.of(host)
        launch = self._launch(host, launcher.is_local)
        log = self._directory / f"launch-{self._spec.epoch}-{self._started}"
        process = launcher.start(launch, log)
        return self.follow(AgentHandle(host, launch.agent, process, _now()))

    def _launch(self, host: str, here: bool) -> Launch:
        return Launch(
            host=host,
            agent=secrets.token_hex(8),
            slots=0,
            addresses=self._server.addresses,
            token=self._token,
            connect_timeout_s=self._options.connect_timeout_s,
            wait_s=max(CONNECT_TIMEOUT_S, self._options.connect_timeout_s),  # several attempts, if each is short
            local_address=self._address_of(host, here),
            socket=str(self._directory / f"agent-{self._spec.epoch}-{self._started}") if here else "",
            directory=os.getcwd(),
            job_directory=str(self._directory) if here else "",
            environment=() if here else passed_on(self._options.env),
        )

    def _address_of(self, host: str, here: bool) -> str:
        """Return the address at which the other hosts reach this host; "": that of its agent's connection."""
        if self._server.is_open:
            return self.own_address if here else ""
        return address_of(host)

    def adopt(self, host: str, dead: Callable[[], None]) -> AgentHandle | None:
        """Follow the agent of a host that the previous driver has started. Return None if it is on another machine, or
        dead; ``dead()`` follows when the processes of a dead agent are killed."""
        self._started += 1
        if not is_this_machine(host) or self._options.listen is not None:
            return None
        pid, socket = commit_directory.agent_on(self._options.commit_dir, self._spec.job_id, host)
        try:
            if not pid:
                raise ProcessLookupError
            return self.follow(AgentHandle(host, "", AdoptedAgent(pid, socket), _now(), pid=pid))
        except ProcessLookupError:
            self._tasks.start(_clear(socket, dead))
            return None

    def accept(self, host: str, agent_id: str, slots: int) -> AgentHandle:
        """Follow an agent that this driver has not started."""
        return self.follow(AgentHandle(host, agent_id, DialledIn(), _now(), slots=slots))

    def follow(self, agent: AgentHandle) -> AgentHandle:
        self.running.add(agent)
        agent.watcher = self._tasks.start(self._watch(agent))
        return agent

    async def _watch(self, agent: AgentHandle) -> None:
        """Wait until the agent's process has ended; on another host, the command that started it."""
        how = await agent.process.ended()
        agent.has_ended = agent.process.is_local
        if not agent.process.is_local and agent.stream is not None:
            agent.process = DialledIn()
            how = await agent.process.ended()
        await agent.process.clear()
        self._ended(agent, how)
        self.running.discard(agent)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Wait until all agents, which have received Shutdown, have ended; at once when ``hurry`` is set."""
        watchers = [agent.watcher for agent in self.running if agent.watcher is not None]
        if not watchers:
            return
        gone = asyncio.ensure_future(asyncio.wait(watchers))
        hurried = asyncio.ensure_future(hurry.wait())
        timeout_s = self._options.stop_timeout_s + self._options.heartbeat_timeout_s  # first its workers, then itself
        await asyncio.wait({gone, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for agent in list(self.running):
            agent.process.kill()
        await gone


async def _clear(socket: str, dead: Callable[[], None]) -> None:
    await in_thread(kill_marked, *agent_variable(socket))
    dead()


def _now() -> float:
    return asyncio.get_running_loop().time()
