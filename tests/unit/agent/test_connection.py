"""A real agent process that loses its driver, finds it again, is refused, or finds another agent on its host."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec import structs

from elasticstate.core.ids import CommitId
from elasticstate.net import messages
from tests.kit.agent import SEAL, SPEAK, Scene, W, play


def tells_of_a_commit(message: object) -> bool:
    return isinstance(message, messages.Stamps) and any(stamp.commit is not None for _, stamp in message.stamps)


def is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_agent_in_touch_again_tells_all_of_its_workers_and_goes_on(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SPEAK)
        assert await scene.hear(messages.HostReport) == messages.HostReport((), ())
        await scene.hear(messages.FromWorker)
        pid = (await scene.hear(messages.Started)).pid
        scene.send(messages.ToWorkers(None, messages.Hold(1)))
        assert await scene.line() == "Hold"
        await scene.cut()
        assert await scene.line() == "Release"
        scene.heard.clear()
        scene.send(scene.spec("unused"))
        stamp = messages.Stamp(messages.Place.TRAIN, 1, 0, None)
        report = messages.WorkerReport(W, pid, 0, stamp, (messages.Gate(1),))
        assert await scene.hear(messages.HostReport) == messages.HostReport((), (report,), incarnations=((0, 1),))
        scene.send(messages.ToWorkers(None, messages.OpenGate(1)))
        assert await scene.line() == "OpenGate"
        scene.send(messages.StopWorker(W, "", kill=True))
        exited = await scene.hear(messages.WorkerExited)
        await scene.cut()
        scene.heard.clear()
        scene.send(scene.spec("unused"))
        last = messages.HostReport((), (), exits=(exited,), incarnations=((0, 1),), gate=1)
        assert await scene.hear(messages.HostReport) == last, "how it ended may not have been heard"
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_what_a_booting_worker_has_not_found_yet_is_told_by_its_agent(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        boot = "if told.worker.incarnation == 2:\n    os.read(os.pipe()[0], 1)\npage.enter(4)"
        await scene.serve(sys.executable, "-c", SEAL.replace("page.enter(4)", boot))
        await scene.hear(messages.WorkerExited)
        scene.heard.clear()
        scene.send(messages.StartWorker(W._replace(incarnation=2)))
        await scene.hear(messages.Started)
        await scene.cut()
        scene.heard.clear()
        scene.send(scene.spec("unused"))
        host_report = await scene.hear(messages.HostReport)
        assert [(report.worker.incarnation, report.generation) for report in host_report.workers] == [(2, 0)]
        assert host_report.commits == ((0, CommitId(4, 1)),), "the next driver must not take it for lost"
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_an_agent_obeys_no_driver_that_is_older_than_its_last_one(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", epoch=3)
        await scene.hear(messages.Started)
        await scene.cut()
        assert scene._streams[0].hello.epoch == 3
        scene.heard.clear()
        old = scene._streams.pop()
        old.send(messages.encode(scene.spec("unused", epoch=2)))
        await scene.until(lambda: bool(scene._streams), "the agent once more")
        assert scene.heard == [], "to the older one it has said nothing"
        scene.send(scene.spec("unused", epoch=4))
        (report,) = (await scene.hear(messages.HostReport)).workers
        assert report.worker == W
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_an_agent_that_is_not_wanted_any_more_stops_its_workers(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        await scene.hear(messages.Started)
        await scene.cut()
        scene._streams[0].refuse("h is no host of this job")
        status, said = await scene.end()
        assert status == 1
        assert "stopping the workers: h is no host of this job" in said

    play(tmp_path, scenario)


def test_an_agent_whose_driver_has_begun_a_new_job_ends(tmp_path: Path) -> None:
    """The record of its job was lost with the driver's machine, and the new driver has the same token file."""

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100", stop_timeout_s=0.2)
        pid = (await scene.hear(messages.Started)).pid
        await scene.cut()
        scene.send(structs.replace(scene.spec("unused"), job_id="another"))
        status, said = await scene.end()
        assert status == 1
        assert "stopping the workers: this driver has begun a new job with the same token" in said
        assert is_gone(pid)

    play(tmp_path, scenario)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["another agent takes over", "the driver had stopped it"])
def test_a_refused_agent_leaves_its_commits_to_the_next_one(tmp_path: Path, is_stopped: bool) -> None:
    """Nobody else may have the newest commit. Only an agent that the driver has stopped removes its commits."""

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL)
        await scene.hear(messages.WorkerExited)
        await scene.cut()
        scene._streams[0].refuse("host h has another agent", is_stopped)
        assert (await scene.end())[0] == 1
        scene.heard.clear()
        await scene.start()
        await scene.until(lambda: bool(scene._streams), "another agent")
        scene.send(scene.spec("sleep", "100"))
        found = (await scene.hear(messages.HostReport)).commits
        assert found == (() if is_stopped else ((0, CommitId(4, 1)),))
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_a_driver_on_another_host_that_says_nothing_is_given_up_and_dialled_again(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(job_directory="", socket="")
        await scene.serve("sleep", "100", heartbeat_timeout_s=0.5, stop_timeout_s=0.2)
        await scene.hear(messages.Started)
        await scene.until(lambda: len(scene._streams) == 2, "the agent once more")
        scene._streams.pop(0)
        scene.send(scene.spec("unused"))
        scene.send(messages.Shutdown("done"))
        status, said = await scene.end()
        assert status == 0
        assert "lost the driver: no message from the driver for --heartbeat-timeout of 0.5 s" in said

    play(tmp_path, scenario)


def test_an_agent_on_another_host_makes_its_own_directory_and_finds_its_address(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(job_directory="", socket="", local_address="")
        await scene.serve("sh", "-c", "echo $PASSED $GIVEN $ELASTICSTATE_LOCAL_ADDRESS $ELASTICSTATE_SOCKET")
        passed, given, address, socket = (await scene.line()).split()
        assert (passed, given, address) == ("on", "1", "127.0.0.1")
        await scene.hear(messages.WorkerExited)
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0
        assert not Path(socket).parent.exists()

    play(tmp_path, scenario)


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(directory="/no/such/directory")
        await scene.until(lambda: bool(scene._streams), "an agent")
        scene.send(scene.spec("true"))
        status, said = await scene.end()
        assert status == 1
        assert "could not start: /no/such/directory, the directory of the job, does not exist on this host" in said

    play(tmp_path, scenario)


def test_an_agent_that_is_stopped_is_killed_by_the_next_one_with_its_workers(tmp_path: Path) -> None:
    """The new agent also kills a stopped worker, which cannot detect that its agent is gone."""

    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", SEAL.replace("os._exit(7)", "os.kill(os.getpid(), 19)"))
        await scene.until(lambda: any(map(tells_of_a_commit, scene.heard)), "a commit")
        pid = (await scene.hear(messages.Started)).pid
        before = scene.agent
        os.kill(before.pid, signal.SIGSTOP)
        await scene.start()
        await scene.until(lambda: bool(scene._streams), "another agent")
        scene.send(scene.spec("sleep", "100", heartbeat_timeout_s=0.5))
        beating = asyncio.ensure_future(scene.heartbeat())
        await scene.until(lambda: messages.HostReport(((0, CommitId(4, 1)),), ()) in scene.heard, "what was left")
        assert await asyncio.wait_for(before.wait(), 60) == -signal.SIGKILL
        await scene.until(lambda: is_gone(pid), "the end of its worker")
        beating.cancel()
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_an_order_that_comes_while_an_agent_takes_its_host_is_carried_out(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100")
        await scene.hear(messages.Started)
        os.kill(scene.agent.pid, signal.SIGSTOP)
        scene.heard.clear()
        await scene.start()
        second = W._replace(incarnation=2)
        await scene.until(lambda: bool(scene._streams), "another agent")
        scene.send(scene.spec("sleep", "100", heartbeat_timeout_s=0.5, stop_timeout_s=0.2))
        scene.send(messages.StartWorker(second))
        beating = asyncio.ensure_future(scene.heartbeat())
        assert (await scene.hear(messages.Started)).worker == second
        beating.cancel()
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_an_agent_that_is_not_needed_leaves_the_one_before_it_alone(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve("sleep", "100")
        await scene.hear(messages.Started)
        before, stream = scene.agent, scene._streams[0]
        await scene.start()
        await scene.until(lambda: bool(scene._streams), "another agent")
        scene.send(scene.spec("sleep", "100"))
        scene._streams[0].refuse("the agent before it is back on h")
        status, said = await scene.end()
        assert status == 1
        assert "another agent has" in said
        scene.agent, scene._streams = before, [stream]
        scene.send(messages.StopWorker(W, "", kill=True))
        await scene.hear(messages.WorkerExited)
        scene.send(messages.Shutdown("done"))
        assert (await scene.end())[0] == 0

    play(tmp_path, scenario)


def test_a_wrong_token_is_said(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start(token="w" * 32, wait_s=2.5)
        status, said = await scene.end()
        assert status == 1
        assert "could not start: 127.0.0.1" in said
        assert "TLS handshake failed: the peer has the token of another job" in said
        assert "token" in scene.refusals[0]

    play(tmp_path, scenario)


# A worker that seals a commit on its page, and exits at once.
