"""A real agent process, driven by a server of this test: its reactions to messages, and to the loss of its driver."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.net import messages
from tests.kit.agent import SEAL, SPEAK, Scene, W, play

LEAVE = """
    if isinstance(order, messages.Leave):
        os._exit(0)
"""


def stamps(heard: list[messages.FromAgent]) -> list[tuple[WorkerId, messages.Stamp]]:
    """Return all stamps, without the times since the last progress."""
    found = [each for message in heard if isinstance(message, messages.Stamps) for each in message.stamps]
    return [(worker, msgspec.structs.replace(stamp, still_s=0.0)) for worker, stamp in found]


def test_orders_reach_the_worker_and_its_words_the_driver(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK)
        assert (await scene.hear(messages.Started)).worker == W
        assert await scene.hear(messages.FromWorker) == messages.FromWorker(W, messages.Gate(1))
        stamp = messages.Stamp(messages.Place.TRAIN, 1, 0, None)
        await scene.until(lambda: (W, stamp) in stamps(scene.heard), "its stamp")
        scene.send(messages.ToWorkers(None, messages.OpenGate(1)))
        scene.send(messages.ToWorkers((WorkerId("h", 7, 1), W), messages.ConfirmOwnError(W, 1)))
        assert [await scene.line(), await scene.line()] == ["OpenGate", "ConfirmOwnError"]
        scene.send(messages.StopWorker(W, "", kill=True))
        exited = await scene.hear(messages.WorkerExited)
        assert (exited.exit_code, exited.signal) == (None, signal.SIGKILL)
        scene.send(messages.Shutdown("done"))
        assert await scene.end() == (0, "")

    play(tmp_path, scenario)


def test_a_worker_that_does_not_leave_is_killed_after_the_stop_timeout(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK, stop_timeout_s=2)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers((W,), messages.Leave(W)))
        assert await scene.line() == "Leave"
        assert (await scene.hear(messages.WorkerExited)).signal == signal.SIGKILL
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
        assert (await scene.hear(messages.WorkerExited)).exit_code == 4

    play(tmp_path, scenario)


def test_without_a_driver_a_hold_is_released_and_training_goes_on_for_a_while(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK + LEAVE, driver_timeout_s=1.0)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers(None, messages.Hold(1)))
        assert await scene.line() == "Hold"
        before = time.monotonic()
        await scene.server.stop()
        assert await scene.line() == "Release"
        status, rest = await scene.end()
        assert time.monotonic() - before >= 1.0, "and not an attempt before"
        assert status == 1
        assert "stopping the workers: no driver within --driver-timeout of 1 s" in rest
        assert "Leave" in rest
        assert not (scene.directory / "job").exists()

    play(tmp_path, scenario)


def test_the_jobs_directory_is_not_made_anew_after_the_last_agent_has_removed_it(tmp_path: Path) -> None:
    always_looking = """
import runpy
import elasticstate.agent.host_storage
elasticstate.agent.host_storage._LOOK_INTERVAL_S = 0.0
runpy.run_module("elasticstate.agent", run_name="__main__")
"""

    async def scenario(scene: Scene) -> None:
        await scene.start(program=("-c", always_looking))
        await scene.serve("sleep", "100", driver_timeout_s=0.1, stop_timeout_s=0.1)
        await scene.hear(messages.Started)
        await scene.server.stop()
        status, rest = await scene.end()
        assert status == 1
        assert "no driver within --driver-timeout" in rest
        assert not (scene.directory / "job").exists()

    play(tmp_path, scenario)


def test_after_end_a_hold_is_not_released(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK, driver_timeout_s=0.3, stop_timeout_s=0.1)
        await scene.hear(messages.FromWorker)
        scene.send(messages.ToWorkers(None, messages.Hold(1)))
        scene.send(messages.ToWorkers(None, messages.End(1, 9, "a host joined")))
        assert [await scene.line(), await scene.line()] == ["Hold", "End"]
        await scene.server.stop()
        assert "Release" not in (await scene.end())[1]

    play(tmp_path, scenario)


def test_sigterm_is_told_and_not_obeyed(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        await scene.hear(messages.Started)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(scene.agent.pid, number)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGTERM to its agent")
        assert scene.agent.returncode is None
        scene.send(messages.Shutdown("drained"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_ctrl_c_drains_the_host_of_an_agent_that_dials_in_and_a_second_one_kills_its_workers(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group: the workers must not be in it."""

    async def scenario(scene: Scene) -> None:
        await scene.start(is_joining=True)
        await scene.serve("sh", "-c", "trap 'echo told' INT TERM; echo up; while :; do sleep 0.01; done")
        assert await scene.line() == "up"
        os.killpg(scene.agent.pid, signal.SIGINT)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGINT to its agent")
        assert not [message for message in scene.heard if isinstance(message, messages.WorkerExited)]
        os.killpg(scene.agent.pid, signal.SIGINT)
        assert (await scene.hear(messages.WorkerExited)).signal == signal.SIGKILL
        status, said = await scene.end()
        assert status == 128 + signal.SIGINT
        assert said.splitlines() == [
            "elasticstate: agent of h: SIGINT: the workers leave the job at the end of a tick. A second Ctrl-C kills "
            "them at once.",
            "elasticstate: agent of h: SIGINT again: killing the workers.",
        ]

    play(tmp_path, scenario)


def test_the_second_ctrl_c_after_a_preemption_notice_kills_and_not_the_first(tmp_path: Path) -> None:
    """The user of the first one has not read yet what the second one does."""

    async def scenario(scene: Scene) -> None:
        await scene.start(is_joining=True)
        await scene.serve("sleep", "100")
        await scene.hear(messages.Started)
        scene.agent.send_signal(signal.SIGTERM)
        await scene.hear(messages.HostDraining)
        scene.agent.send_signal(signal.SIGINT)
        scene.send(messages.Shutdown("drained"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_ctrl_c_ends_an_agent_that_has_lost_its_driver_at_the_second_time(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(is_joining=True)
        await scene.serve("sleep", "100")
        await scene.hear(messages.Started)
        await scene.server.stop()
        assert scene.agent.stderr is not None
        assert b"lost the driver" in await scene.agent.stderr.readline()
        scene.agent.send_signal(signal.SIGINT)
        assert b"SIGINT: the workers leave the job when the driver is back." in await scene.agent.stderr.readline()
        scene.agent.send_signal(signal.SIGINT)
        assert (await scene.end())[0] == 128 + signal.SIGINT

    play(tmp_path, scenario)


def test_a_signal_that_is_no_notice_has_its_usual_effect(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", preemption_signals=(signal.SIGUSR1,))
        await scene.hear(messages.Started)
        scene.agent.send_signal(signal.SIGUSR1)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGUSR1 to its agent")
        scene.agent.send_signal(signal.SIGTERM)
        assert (await scene.end())[0] == -signal.SIGTERM

    play(tmp_path, scenario)


def test_sigterm_before_there_is_a_driver_is_told_as_soon_as_there_is_one(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.until(lambda: scene.has_joined, "an agent")
        scene.agent.send_signal(signal.SIGTERM)
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGTERM to its agent")
        assert [type(message) for message in scene.heard[:2]] == [messages.HostReport, messages.HostDraining]
        scene.send(messages.Shutdown("drained"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_ctrl_c_during_the_greeting_drains_the_host(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(is_joining=True)
        await scene.until(lambda: scene.has_joined, "an agent")
        scene.agent.send_signal(signal.SIGINT)
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        assert await scene.hear(messages.HostDraining) == messages.HostDraining("h", "SIGINT to its agent")
        scene.send(messages.Shutdown("drained"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_the_last_commit_of_a_worker_is_told_before_its_end_and_outlives_it(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL)
        assert await scene.line() == "(0, 0, 0, 0) None"
        exited = await scene.hear(messages.WorkerExited)
        told = stamps(scene.heard[: scene.heard.index(exited)])
        assert told[-1] == (W, messages.Stamp(messages.Place.TRAIN, 4, 1, CommitId(4, 1)))
        scene.send(messages.StartWorker(WorkerId("h", 0, 2)))
        assert await scene.line() == "(0, 0, 0, 0) (4, 1, 0, 0, 0)", "a new process has no past but the seals"
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0
        assert not list(scene.directory.glob("elasticstate-*"))

    play(tmp_path, scenario)


def test_an_agent_after_one_that_was_killed_tells_what_that_has_left(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL)
        assert await scene.hear(messages.HostReport) == messages.HostReport((), ())
        await scene.hear(messages.WorkerExited)
        scene.agent.kill()
        await scene.agent.wait()
        await scene.start()
        await scene.serve("sleep", "100")
        await scene.until(lambda: messages.HostReport(((0, CommitId(4, 1)),), ()) in scene.heard, "what was left")
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0
        assert not list(scene.directory.glob("elasticstate-*"))

    play(tmp_path, scenario)


# A worker that requests commit storage twice, and prints the answers.
ASK = """
import os
from elasticstate.options import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
told = worker_environment()
link = WorkerLink(told.socket)
link.connect()
link._socket.setblocking(True)
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
for size in (100_000, 1 << 60):
    link.send(messages.GrowBuffer(1, size))
    print(messages.decode_to_worker(link._socket.recv(100_000)), flush=True)
print(os.stat(told.commits + ".1.safetensors").st_size, flush=True)
"""


def test_a_worker_is_given_room_for_its_commits_or_told_why_not(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", ASK)
        assert await scene.line() == "BufferGrown(index=1, bytes=131072, error='')"
        assert "commits do not fit into --commit-dir" in await scene.line()
        assert await scene.line() == "131072"
        scene.send(messages.Shutdown("done"))
        status, _ = await scene.end()
        assert status == 0

    play(tmp_path, scenario)
