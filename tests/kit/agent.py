"""A real agent process, driven by a server of the test, and the programs of its workers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.net import messages
from elasticstate.net.control import AgentStream, ControlServer
from elasticstate.net.messages import Launch
from elasticstate.net.trust import Trust
from elasticstate.options import Options

W = WorkerId("h", 0, 1)
JOB_ID = "c0ffee"
TOKEN = "t" * 32
M = TypeVar("M")
SPEC = messages.JobSpec(
    job="j",
    job_id=JOB_ID,
    epoch=1,
    options=Options(
        command=("true",),
        heartbeat_timeout_s=60.0,
        start_timeout_s=60.0,
        stop_timeout_s=60.0,
        driver_timeout_s=60.0,
        preemption_interval_s=0.05,
    ),
    environment=(("GIVEN", "1"),),
)

# A worker that sends Hello, and prints each message that it receives.
SPEAK = """
import os, sys, time
from elasticstate._native import ControlPage
from elasticstate.options import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import StorageLink, WorkerLink
told = worker_environment()
page = ControlPage(StorageLink(told.socket, told.worker).ask().page)
link = WorkerLink(told.socket)
link.connect()
page.enter(1)
page.set_place(messages.Place.TRAIN)
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
link.send(messages.Gate(1))
while True:
    try:
        order = link.receive()
    except BlockingIOError:
        page.heartbeat()
        time.sleep(0.01)
        continue
    if order is None:
        os._exit(1)
    print(type(order).__name__, flush=True)
"""


SEAL = """
import os
import re
from elasticstate._native import ControlPage
from elasticstate.commits import owner_of
from elasticstate.options import worker_environment
from elasticstate.net.link import StorageLink
told = worker_environment()
page = ControlPage(StorageLink(told.socket, told.worker).ask().page)
owner = owner_of(told.job_id, told.worker.host, told.worker.slot)
seal = page.sealed(0, owner)
print(page.stamp()[1:], seal and seal[:5], flush=True)
page.enter(4)
page.set_place(2)
page.word.add_tick()
page.seal(0, owner, generation=4, tick=told.worker.incarnation, layout=0, length=0, checksum=0)
os._exit(7)
"""


class Scene:
    """The driver's server, an agent that it has started, and the messages of the agent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard: list[messages.FromAgent] = []
        self.lost = asyncio.Event()
        self.port = 0
        self.refusals: list[str] = []
        self.agents: list[asyncio.subprocess.Process] = []
        self._agents = 0
        self._streams: list[AgentStream] = []
        self.server = ControlServer(Trust(TOKEN), 5.0, self)

    def agent_joined(self, stream: AgentStream) -> None:
        self._streams.append(stream)

    def agent_sent(self, _: AgentStream, message: messages.FromAgent) -> None:
        if isinstance(message, messages.HostReport):
            message = msgspec.structs.replace(message, store="")  # its port is another one each time
        if isinstance(message, messages.HostReport):  # of the copy server, at any port
            message = msgspec.structs.replace(message, copies_address="")
        self.heard.append(message)

    def agent_lost(self, stream: AgentStream, _: str) -> None:
        self.lost.set()

    def status(self, as_json: bool) -> str:
        return ""

    def refused(self, _: str, reason: str) -> None:
        self.refusals.append(reason)

    async def start(self, **changes: Any) -> None:
        """Start an agent. A second call starts another agent for the same host.

        ``program``: arguments of Python, if it is not the usual program.
        """
        program = changes.pop("program", ("-m", "elasticstate.agent"))
        job = self.directory / "job"
        if not self.port:
            self.port = self.server.listen("127.0.0.1")
            job.mkdir(mode=0o700)
        self._streams.clear()
        self._agents += 1
        launch = Launch(
            host="h",
            agent=f"agent {self._agents}",
            slots=0,
            addresses=(f"127.0.0.1:{self.port}",),
            token=TOKEN,
            connect_timeout_s=5.0,
            wait_s=5.0,
            local_address="127.0.0.1",
            socket=str(job / f"s{self._agents}"),
            directory=str(self.directory),
            job_directory=str(job),
            environment=(("PASSED", "on"),),
        )
        launch = msgspec.structs.replace(launch, **changes)
        self.agent = await asyncio.create_subprocess_exec(
            sys.executable,
            *program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # its process group is that of a terminal
        )
        self.agents.append(self.agent)
        assert self.agent.stdin is not None
        self.agent.stdin.write(msgspec.json.encode(launch) + b"\n")

    @property
    def has_joined(self) -> bool:
        return bool(self._streams)

    async def serve(self, *command: str, **changes: Any) -> None:
        """Send the job to the agent, and let it start one worker."""
        await self.until(lambda: bool(self._streams), "an agent")
        self.send(self.spec(*command, **changes))
        self.send(messages.StartWorker(W))

    def spec(self, *command: str, **changes: Any) -> messages.JobSpec:
        epoch = changes.pop("epoch", SPEC.epoch)
        options = replace(SPEC.options, command=command, commit_dir=str(self.directory), **changes)
        return msgspec.structs.replace(SPEC, epoch=epoch, options=options)

    def send(self, order: messages.ToAgent) -> None:
        self._streams[0].send(order)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(look(), 60)
        except asyncio.TimeoutError:
            said = b""
            if self.agent.returncode is not None and self.agent.stderr is not None:
                said = await self.agent.stderr.read()
            pytest.fail(f"has not come: {what}; heard {self.heard}; the agent: {self.agent.returncode} {said.decode()}")

    async def hear(self, kind: type[M]) -> M:
        def found() -> list[M]:
            return [message for message in self.heard if isinstance(message, kind)]

        await self.until(lambda: bool(found()), kind.__name__)
        return found()[0]

    async def heartbeat(self) -> None:
        """Send heartbeats forever, like a live driver."""
        while True:
            self._streams[0].write(b"")
            await asyncio.sleep(0.05)

    async def cut(self) -> None:
        """Close the connection of the agent, and wait until it has dialled again."""
        stream = self._streams.pop()
        stream.abort("cut")
        await self.until(lambda: bool(self._streams), "the agent once more")

    async def line(self) -> str:
        """Return the next line that a worker prints, without its tag."""
        assert self.agent.stdout is not None
        return _untagged((await asyncio.wait_for(self.agent.stdout.readline(), 60)).decode().strip())

    async def end(self) -> tuple[int, str]:
        """Wait for the end of the agent. Return its exit status, and its remaining output with that of its workers."""
        stdout, stderr = await asyncio.wait_for(self.agent.communicate(), 60)
        assert self.agent.returncode is not None
        return self.agent.returncode, _untagged((stdout + stderr).decode())


def _untagged(text: str) -> str:
    return re.sub(r"^\[h:\d+\] ", "", text, flags=re.MULTILINE)


def play(directory: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene(directory)
        try:
            await scenario(scene)
        finally:
            for agent in scene.agents:
                if agent.returncode is None:
                    agent.kill()
                    await agent.wait()
            await scene.server.stop()

    asyncio.run(run())
