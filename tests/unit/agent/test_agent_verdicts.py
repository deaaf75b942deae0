"""A real agent between a worker whose commits are compared, and its driver."""

from __future__ import annotations

import sys
from pathlib import Path

from elasticstate.core.types import CommitsCompared
from elasticstate.net import messages
from tests.kit.agent import Scene, W, play

# A worker that makes three commits and sends their digests. Then it prints each verdict, and if it has a driver.
COMMIT = """
import os, time
from elasticstate._native import ControlPage
from elasticstate.commits import owner_of
from elasticstate.options import worker_environment
from elasticstate.net import messages
from elasticstate.net.link import StorageLink, WorkerLink
told = worker_environment()
page = ControlPage(StorageLink(told.socket, told.worker).ask().page)
owner = owner_of(told.job_id, told.worker.host, told.worker.slot)
link = WorkerLink(told.socket)
link.connect()
page.enter(1)
page.set_place(messages.Place.TRAIN)
link.send(messages.Hello(told.worker, os.getpid(), messages.PROTOCOL_VERSION))
for tick in (1, 2, 3):
    page.seal(tick % 2, owner, generation=1, tick=tick, layout=0, length=0, checksum=0)
    link.send(messages.CommitDigests(1, ((tick - 1, tick, 100 + tick),), True))
said = None
while True:
    page.heartbeat()
    verdict = page.verdict(0)
    found = (verdict and verdict[1:], page.is_alone)
    if found != said:
        said = found
        print(*found, flush=True)
    time.sleep(0.01)
"""


def digests(heard: list[messages.FromAgent]) -> list[int]:
    """Return the ticks whose digests have arrived by themselves."""
    bodies = [message.body for message in heard if isinstance(message, messages.FromWorker)]
    return [tick for body in bodies if isinstance(body, messages.CommitDigests) for _, tick, _ in body.digests]


def test_digests_are_sent_at_once_verdicts_reach_the_page_and_a_new_driver_gets_the_digests_of_held_commits(
    tmp_path: Path,
) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.start()
        await scene.serve(sys.executable, "-c", COMMIT)
        assert await scene.line() == "None False"
        await scene.until(lambda: digests(scene.heard) == [1, 2, 3], "the digests")
        stamps = [stamp for m in scene.heard if isinstance(m, messages.Stamps) for _, stamp in m.stamps]
        assert not any(stamp.digests for stamp in stamps)
        scene.send(CommitsCompared(1, 2, 3))
        assert await scene.line() == "(1, 2, 3) False"
        await scene.cut()
        assert await scene.line() == "(1, 2, 3) True", "no verdict comes without a driver"
        scene.send(scene.spec(sys.executable, "-c", COMMIT, epoch=2))
        assert await scene.line() == "(1, 2, 3) False"
        (report,) = [m for m in scene.heard if isinstance(m, messages.HostReport)][1:]
        (worker,) = report.workers
        kept = [body for body in worker.lasting if isinstance(body, messages.CommitDigests)]
        assert (worker.worker, [body.digests[0][1] for body in kept]) == (W, [2, 3])
        scene.send(messages.StopWorker(W, "", kill=True))
        await scene.hear(messages.WorkerExited)
        scene.send(messages.Shutdown("done"))
        await scene.end()

    play(tmp_path, scenario)
