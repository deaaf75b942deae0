"""A real agent process, driven by a server of this test: what it does with orders, and without a driver."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc.aio
import msgspec
import pytest

from elasticstate.core.types import CommitId, WorkerId
from elasticstate.net import messages
from elasticstate.net.rpc import AgentStream, ControlServer

grpc.aio.init_grpc_aio()  # its thread lives as long as the process: it is here before the first test looks at threads

W = WorkerId("h", 0, 1)
JOB_ID = "c0ffee"
M = TypeVar("M")

# A worker that says hello and prints each order that it gets.
SPEAK = """
import os, sys, time
from elasticstate._native import ControlPage
from elasticstate.commits import control_file
from elasticstate.config import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
told = worker_environment()
link = WorkerLink(told.socket)
link.connect()
page = ControlPage(control_file(told.commits))
page.enter(1)
page.set_place(messages.Place.TRAIN)
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
link.send(messages.Gate(1))
while True:
    try:
        order = link.receive()
    except BlockingIOError:
        page.beat()
        time.sleep(0.01)
        continue
    if order is None:
        os._exit(1)
    print(type(order).__name__, flush=True)
"""


class Scene:
    """A driver's server, an agent that it has started, and what the agent says."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard: list[messages.FromAgent] = []
        self.lost = asyncio.Event()
        self.address = ""
        self._agents = 0
        self._streams: list[AgentStream] = []
        self.server = ControlServer(
            "secret",
            self._streams.append,
            lambda _, message: self.heard.append(message),
            lambda *_: self.lost.set(),
            lambda: "",
        )

    async def start(self, token: str = "secret") -> None:
        """Start an agent; the second time another one for the same host."""
        job = self.directory / "job"
        if not self.address:
            self.address = await self.server.start()
            job.mkdir(mode=0o700)
        self._streams.clear()
        self._agents += 1
        socket = str(job / f"s{self._agents}")
        launch = messages.Launch("h", self.address, token, "127.0.0.1", socket, str(self.directory), str(job))
        self.agent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "elasticstate.agent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.agent.stdin is not None
        self.agent.stdin.write(msgspec.json.encode(launch) + b"\n")

    async def serve(self, *command: str, driver_timeout_s: float = 60.0, stop_timeout_s: float = 60.0) -> None:
        """Tell the agent the job, and let it start one worker."""
        await self.until(lambda: bool(self._streams), "an agent")
        spec = messages.JobSpec(
            job="j",
            job_id=JOB_ID,
            command=command,
            commit_dir=str(self.directory),
            heartbeat_timeout_s=60.0,
            hang_timeout_s=None,
            start_timeout_s=60.0,
            stop_timeout_s=stop_timeout_s,
            driver_timeout_s=driver_timeout_s,
            tag_output=False,
            log_dir=None,
            environment=(("GIVEN", "1"),),
        )
        self.send(spec)
        self.send(messages.Spawn(W))

    def send(self, order: messages.ToAgent) -> None:
        self._streams[0].send(messages.encode(order))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(look(), 15)
        except asyncio.TimeoutError:
            pytest.fail(f"has not come: {what}; heard {self.heard}")

    async def hear(self, kind: type[M]) -> M:
        def found() -> list[M]:
            return [message for message in self.heard if isinstance(message, kind)]

        await self.until(lambda: bool(found()), kind.__name__)
        return found()[0]

    async def line(self) -> str:
        """The next line that a worker prints."""
        assert self.agent.stdout is not None
        return (await asyncio.wait_for(self.agent.stdout.readline(), 15)).decode().strip()

    async def end(self) -> tuple[int, str]:
        """Exit status of the agent, and the rest of what it and its workers have printed."""
        stdout, stderr = await asyncio.wait_for(self.agent.communicate(), 15)
        assert self.agent.returncode is not None
        return self.agent.returncode, (stdout + stderr).decode()


def play(directory: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene(directory)
        try:
            await scenario(scene)
        finally:
            if scene.agent.returncode is None:
                scene.agent.kill()
                await scene.agent.wait()
            await scene.server.stop()

    asyncio.run(run())


def test_orders_reach_the_worker_and_its_words_the_driver(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK)
        assert (await scene.hear(messages.Started)).worker == W
        assert await scene.hear(messages.FromWorker) == messages.FromWorker(W, messages.Gate(1))
        stamp = messages.Stamp(messages.Place.TRAIN, 1, 0, None)
        await scene.until(lambda: messages.Stamps(((W, stamp),)) in scene.heard, "its stamp")
        scene.send(messages.ToWorkers(None, messages.GateOpen(1)))
        scene.send(messages.ToWorkers((WorkerId("h", 7, 1), W), messages.OwnError(1)))
        assert [await scene.line(), await scene.line()] == ["GateOpen", "OwnError"]
        scene.send(messages.Stop(W, "", kill=True))
        exited = await scene.hear(messages.Exited)
        assert (exited.exit_code, exited.signal) == (None, signal.SIGKILL)
        scene.send(messages.Shutdown("done"))
        assert await scene.end() == (0, "")

    play(tmp_path, scenario)


def test_a_worker_that_does_not_leave_is_killed_after_the_stop_timeout(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK, stop_timeout_s=0.3)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers((W,), messages.LeaveOrder()))
        assert await scene.line() == "LeaveOrder"
        assert (await scene.hear(messages.Exited)).signal == signal.SIGKILL
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_a_plain_command_gets_sigterm(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sh", "-c", "trap 'echo told; exit 4' TERM; echo up $GIVEN; while :; do sleep 0.01; done")
        assert await scene.line() == "up 1"
        scene.send(messages.Shutdown("done"))
        assert await scene.line() == "told"
        assert (await scene.end())[0] == 0
        assert (await scene.hear(messages.Exited)).exit_code == 4

    play(tmp_path, scenario)


def test_without_a_driver_a_hold_is_released_and_training_goes_on_for_a_while(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK, driver_timeout_s=1.0, stop_timeout_s=0.1)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers(None, messages.HoldOrder(1)))
        assert await scene.line() == "HoldOrder"
        await scene.server.stop()
        assert await scene.line() == "ReleaseOrder"
        status, rest = await scene.end()
        assert status == 1
        assert "no driver for --driver-timeout of 1 s: stops its workers" in rest
        assert "LeaveOrder" in rest
        assert not (scene.directory / "job").exists()

    play(tmp_path, scenario)


def test_after_end_a_hold_is_not_released(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK, driver_timeout_s=0.3, stop_timeout_s=0.1)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers(None, messages.HoldOrder(1)))
        scene.send(messages.ToWorkers(None, messages.EndOrder(1, 9, "a host joined")))
        assert [await scene.line(), await scene.line()] == ["HoldOrder", "EndOrder"]
        await scene.server.stop()
        assert "ReleaseOrder" not in (await scene.end())[1]

    play(tmp_path, scenario)


def test_the_end_of_stdin_is_the_end_of_the_driver(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", driver_timeout_s=0.2)
        await scene.hear(messages.Started)
        assert scene.agent.stdin is not None
        scene.agent.stdin.close()
        await asyncio.wait_for(scene.agent.wait(), 15)
        assert scene.agent.returncode == 1

    play(tmp_path, scenario)


def test_sigterm_is_told_and_not_obeyed(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        await scene.hear(messages.Started)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(scene.agent.pid, number)
        await scene.hear(messages.AgentNotice)
        assert scene.agent.returncode is None
        scene.send(messages.Shutdown("drained"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_a_wrong_token_is_said(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(token="wrong")
        status, said = await scene.end()
        assert status == 1
        assert "cannot serve: UNAUTHENTICATED: the job's token is missing or wrong" in said

    play(tmp_path, scenario)


# A worker that seals a commit on its page, and dies at once.
SEAL = """
import os
from elasticstate._native import ControlPage
from elasticstate.commits import control_file, owner_of
from elasticstate.config import worker_environment
told = worker_environment()
page = ControlPage(control_file(told.commits))
owner = owner_of(told.job_id, told.worker.host, told.worker.slot)
print(page.stamp()[1:], page.sealed(0, owner), flush=True)
page.enter(4)
page.set_place(2)
page.word.add_tick()
page.seal(0, owner, generation=4, tick=told.worker.incarnation, layout=0, length=0, checksum=0)
os._exit(7)
"""


def test_the_last_commit_of_a_worker_is_told_before_its_end_and_outlives_it(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL)
        assert await scene.line() == "(0, 0, 0, 0) None"
        exited = await scene.hear(messages.Exited)
        told = [s for m in scene.heard[: scene.heard.index(exited)] if isinstance(m, messages.Stamps) for s in m.stamps]
        assert told[-1] == (W, messages.Stamp(messages.Place.TRAIN, 4, 1, CommitId(4, 1)))
        scene.send(messages.Spawn(WorkerId("h", 0, 2)))
        assert await scene.line() == "(0, 0, 0, 0) (4, 1, 0, 0, 0)", "a new process has no past but the seals"
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0
        assert not list(scene.directory.glob("elasticstate-*"))

    play(tmp_path, scenario)


def test_an_agent_after_one_that_was_killed_tells_what_that_has_left(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL)
        assert await scene.hear(messages.Serving) == messages.Serving(())
        await scene.hear(messages.Exited)
        scene.agent.kill()
        await scene.agent.wait()
        await scene.start()
        await scene.serve("sleep", "100")
        await scene.until(lambda: messages.Serving(((0, CommitId(4, 1)),)) in scene.heard, "what was left")
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0
        assert not list(scene.directory.glob("elasticstate-*"))

    play(tmp_path, scenario)


# A worker that asks for room twice, and prints the answers.
ASK = """
import os
from elasticstate.config import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
told = worker_environment()
link = WorkerLink(told.socket)
link.connect()
link._socket.setblocking(True)
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
for size in (100_000, 1 << 60):
    link.send(messages.NeedSpace(1, size))
    print(messages.decode_to_worker(link._socket.recv(100_000)), flush=True)
print(os.stat(told.commits + ".1.safetensors").st_size, flush=True)
"""


def test_a_worker_is_given_room_for_its_commits_or_told_why_not(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", ASK)
        assert await scene.line() == "Space(index=1, bytes=131072, error='')"
        assert "commits do not fit into --commit-dir" in await scene.line()
        assert await scene.line() == "131072"
        scene.send(messages.Shutdown("done"))
        status, said = await scene.end()
        assert status == 0
        assert "commits take 262.1 kB on this host (1 worker x 2 x 131.1 kB)" in said

    play(tmp_path, scenario)
