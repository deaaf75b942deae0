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

    def begin(self) -> None:
        """Start the process, unless it runs. StandbyListens follows."""
        if self._process is None:
            self._job.begin(self._run())

    async def _run(self) -> None:
        job, options = self._job, self._job.options
        order = StandbyOrder(
            job=job.spec.job,
            token=job.launch.token,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            connect_timeout_s=options.connect_timeout_s,
        )
        try:
            process = self._process = await in_thread(_start, msgspec.json.encode(order) + b"\n")
        except OSError as error:
            job.driver.send(StandbyListens(0, f"could not be started: {error}"))
            return
        assert process.stdout is not None
        async with reading(process.stdout) as reader:
            while line := await reader.readline():
                port = int(line) if line.strip().isdigit() else 0
                if port:
                    job.driver.send(StandbyListens(port))
        await ended_child(process.pid)
        code, self._process = process.wait(), None
        job.driver.send(StandbyListens(0, f"ended with exit code {code}"))

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
