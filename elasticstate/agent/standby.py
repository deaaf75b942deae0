"""The standby beside an agent: a process that becomes the job's driver when enough agents have missed the driver.

It is ``elasticrun --standby`` (driver/election.py). It ends with its agent, unless it leads the job by then.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import msgspec

from elasticstate.agent.host_job import HostJob
from elasticstate.net.messages import StandbyListens, StandbyOrder
from elasticstate.processes import ended_child, reading
from elasticstate.threads import in_thread


class Standby:
    """The standby of this host, if the driver has asked for one."""

    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = False  # a driver has asked for a standby, and none listens yet
        self._port = 0  # where it listens; 0: not yet, or no more

    def begin(self) -> None:
        """Start the process, unless it runs, perhaps for an earlier driver. StandbyListens follows."""
        if self._port:
            self._job.driver.send(StandbyListens(self._port))
        elif not self._is_wanted:
            self._is_wanted = True
            if self._process is None:
                self._job.begin(self._run())

    async def _run(self) -> None:
        """Run a process, and another one if a driver asks for a standby while it ends as the last driver."""
        job, options = self._job, self._job.options
        order = StandbyOrder(
            job=job.spec.job,
            token=job.launch.token,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            connect_timeout_s=options.connect_timeout_s,
        )
        has_listened, reason = True, ""
        while self._is_wanted and has_listened:
            has_listened = False
            try:
                process = self._process = await in_thread(_start, msgspec.json.encode(order) + b"\n")
            except OSError as error:
                reason = f"could not be started: {error}"
                continue
            assert process.stdout is not None
            async with reading(process.stdout) as reader:
                while line := await reader.readline():
                    if line.strip().isdigit():
                        self._port, self._is_wanted, has_listened = int(line), False, True
                        job.driver.send(StandbyListens(self._port))
            self._port = 0  # it leads the job, or has ended
            await ended_child(process.pid)
            code, self._process = process.wait(), None
            reason = f"ended with exit code {code}"
        self._is_wanted = False
        job.driver.send(StandbyListens(0, reason))

    async def close(self) -> None:
        """End the process, unless it leads the job: then its stdin means nothing to it."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def _start(order: bytes) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "elasticstate", "--standby")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        process.stdin.write(order)
        process.stdin.flush()
    except OSError:
        process.kill()
        process.wait()
        raise
    return process
