"""A process that is one host of a job, until its stdin ends: ``python host_process.py NAME DIRECTORY [BYTES TARGET]``.

It prints its address. With BYTES and TARGET it commits and replicates to the target first, unless its store has a copy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from elasticstate.core.ids import CommitId
from elasticstate.replicas.pusher import Target
from tests.kit.commits import Host


def say(text: object) -> None:
    """Print a line in one piece: a thread of the copies may print at the same time."""
    os.write(1, f"{text}\n".encode())


def main(name: str, directory: str, size: str = "", target: str = "") -> None:
    with Host(name, Path(directory)) as host:
        if size:
            worker = host.worker()
            worker.commit(CommitId(1, 1), bytes(range(256)) * (int(size) // 256))
            if os.environ.get("STOP_BEFORE") == "finish":
                host.copies.store.finish = lambda *_: say("stopped") or sys.stdin.read()  # type: ignore
            elif os.environ.get("STOP_BEFORE") == "seal":
                host.copies.store._mac = lambda *_: say("stopped") or sys.stdin.read()  # type: ignore
            host.copies.replicate(CommitId(1, 1), {0: [Target("b", target)]})
        say(host.address)
        while line := sys.stdin.readline():
            say(host.report()) if line == "report\n" else None


main(*sys.argv[1:])
