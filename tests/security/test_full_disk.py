"""Full disks, one after the other, under the log files, the event file, the record and the commits of one job.

The disks are small tmpfs mounts in a mount namespace of the job. Nothing reads the stdout of the job meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and unshare")

SCRIPT = Path(__file__).parent / "scripts" / "chatty.py"
MOST_GROWTH_BYTES = 64 << 20  # of driver and agent: 1 MiB for each of six outputs, 16 for the events, and slack
WINDOW_S = 1.5


class Disks:
    """The job, with a file system for each name. The test accesses them from outside of the job's namespace."""

    megabytes = {"logs": 64, "events": 4, "record": 4, "commits": 4}  # noqa: RUF012

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        mounts = ""
        self.places = {name: directory / name for name in self.megabytes}
        self.places["record"] = Path(os.environ["XDG_RUNTIME_DIR"])  # a short path, because it contains sockets
        for name, size in self.megabytes.items():
            self.places[name].mkdir(exist_ok=True)
            mounts += f'mount -t tmpfs -o size={size}m,mode=700 none "{self.places[name]}" && '
        self.name = f"full-{os.getpid()}"
        options = [
            *("-np", "2", "--min-np", "1", "--job-name", self.name, "--stop-timeout", "2"),
            *("--log-dir", str(directory / "logs"), "--events-file", str(directory / "events" / "file")),
            *("--commit-dir", str(directory / "commits")),
        ]
        self.stderr = open(directory / "stderr", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} exec "$@"', "sh"),
                *(sys.executable, "-m", "elasticstate", *options, "--", sys.executable, str(SCRIPT), str(directory)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __getitem__(self, name: str) -> Path:
        """Return the path of a file system of the job, as seen from outside of its mount namespace."""
        return Path(f"/proc/{self.process.pid}/root{self.places[name]}")

    def fill(self, name: str) -> None:
        path = self[name]
        with open(path / "filler", "wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 12))
        assert os.statvfs(path).f_bavail == 0

    def free(self, name: str) -> None:
        (self[name] / "filler").unlink()

    def events(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self["events"] / "file").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [e for e in (json.loads(line) for line in lines if line.endswith("\n")) if e["event"] == name]

    def status(self) -> str:
        command = [sys.executable, "-m", "elasticstate", "status", self.name]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self["record"])}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout

    def said(self) -> str:
        return (self.directory / "stderr").read_text()

    def ticks(self) -> list[float]:
        path = self.directory / "ticks-0"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            ended = self.process.poll()
            assert ended is None, f"no {what}; the job ended with {ended}: {self.said()}"
            assert time.monotonic() < deadline, f"no {what}: {self.said()}"
            time.sleep(0.02)
        return found

    def gap(self) -> float:
        """Return the mean time between ticks, measured from now on for WINDOW_S."""
        begin = time.monotonic()
        self.until(lambda: time.monotonic() > begin + WINDOW_S, "time")
        return WINDOW_S / max(1, sum(tick > begin for tick in self.ticks()))

    def memory(self) -> int:
        driver = psutil.Process(self.process.pid)
        agents = [child for child in driver.children() if "elasticstate.agent" in child.cmdline()]
        assert len(agents) == 1
        return sum(process.memory_info().rss for process in (driver, *agents))

    def workers(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if str(SCRIPT) in process.cmdline()]


@pytest.fixture
def disks(tmp_path: Path) -> Any:
    job = Disks(tmp_path)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            for process in psutil.Process(job.process.pid).children(recursive=True):
                process.kill()
            job.process.kill()
        job.process.communicate()
        job.stderr.close()


def test_nothing_waits_for_a_full_disk(disks: Disks) -> None:
    disks.until(lambda: len(disks.ticks()) > 20, "training")
    usual, memory = disks.gap(), disks.memory()
    logs = f"--log-dir {disks.directory / 'logs'}"

    def is_as_usual() -> None:
        assert disks.gap() < 2 * usual
        assert disks.memory() - memory < MOST_GROWTH_BYTES

    disks.fill("logs")
    is_as_usual()
    disks.until(
        lambda: any(e["output"] == logs and "No space" in e["reason"] for e in disks.events("output_blocked")),
        "an event on the log files",
    )
    shown = rf"host localhost: {re.escape(logs)}: No space left on device, .* \d{{5,}} bytes dropped"
    disks.until(lambda: re.search(shown, disks.status()), "bytes that were dropped, in the status")
    disks.free("logs")
    resumed = disks.until(lambda: [e for e in disks.events("output_resumed") if e["output"] == logs], "an end of that")
    assert resumed[0]["dropped_bytes"] > 0
    for log in (disks["logs"]).iterdir():
        size = log.stat().st_size
        if log.suffix == ".out":
            disks.until(lambda log=log, size=size: log.stat().st_size > size, f"more in {log}")

    disks.fill("commits")
    is_as_usual()
    disks.free("commits")

    disks.fill("events")
    size = (disks["events"] / "file").stat().st_size
    is_as_usual()
    disks.workers()[0].kill()
    disks.until(lambda: disks.said().count("ended: SIGKILL") == 1, "the end of a worker")
    disks.until(lambda: "generation 3: 2 workers" in disks.said(), "another one")
    assert (disks["events"] / "file").stat().st_size - size < 4096, "the disk was full"
    disks.free("events")
    disks.until(lambda: [e["size"] for e in disks.events("world_formed")] == [2, 1, 2], "the events, late")

    disks.fill("record")
    is_as_usual()
    disks.workers()[0].kill()
    disks.until(lambda: "generation 4: 1 worker" in disks.said(), "a world, although the record cannot be written")
    assert disks.said().count("until then no new driver can reattach") == 1
    is_as_usual()

    said = disks.said()
    assert said.count(f"warning: host localhost: {logs}: No space left on device") == 1
    dropped = resumed[0]["dropped_bytes"]
    assert said.count(f"host localhost: {logs} can be written again; dropped {dropped} bytes") == 1
    stdout = [e for e in disks.events("output_blocked") if e["output"] == "stdout"]
    assert stdout, "nobody reads it"
    assert not any(e["workers"] for e in stdout), "nor waits for it"
    (disks.directory / "stop").touch()
    assert disks.process.wait(60) == 0, disks.said()
