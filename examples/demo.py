"""A job in trouble: digits.py with four workers on two local host names, while things happen to it.

A worker is killed with SIGKILL; a host is taken away, and comes back. The training goes on all the time, and reaches
its accuracy. Exit status 0 if all of that happened. ``make demo`` runs this.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).parent
ELASTICRUN = Path(sys.executable).with_name("elasticrun")
TIMEOUT_S = 120.0
MIN_ACCURACY = 0.95


def wait_until(job: subprocess.Popen[bytes], what: str, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        if job.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"demo: waited in vain for {what}; status of the job: {job.poll()}")
        time.sleep(0.05)


def sizes_of_worlds(events_file: Path) -> list[int]:
    """The sizes of the worlds so far, from the event file: one JSON object per line."""
    events = map(json.loads, events_file.read_text().split("\n")[:-1])  # whole lines only
    return [event["size"] for event in events if event["event"] == "world_formed"]


def worker_process(job: subprocess.Popen[bytes], seat: str) -> psutil.Process:
    """The process of the worker in a seat (host:slot)."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a discovery script comes and goes
            if process.environ().get("ELASTICSTATE_WORKER", "").startswith(f"{seat}:"):
                return process
    sys.exit(f"demo: no worker runs in {seat}")


def run(folder: Path) -> str:
    """Run the job, and let things happen to it; returns what the workers printed."""
    hosts, events, logs = folder / "hosts", folder / "events", folder / "logs"
    hosts.write_text("localhost:2\n127.0.0.2:2\n")
    options = ["-np", "4", "--min-np", "2", "--max-np", "4", "--min-interrupt-distance", "1", "--log-dir", logs]
    options += ["--events-file", events, "--host-discovery-script", EXAMPLES / "discover.sh"]
    command = [ELASTICRUN, *options, sys.executable, "-u", EXAMPLES / "digits.py", "--epochs", "40", "--pace", "0.03"]
    with subprocess.Popen(command, env=os.environ | {"HOSTS_FILE": str(hosts)}) as job:
        try:
            wait_until(job, "the first epochs", lambda: any("epoch 5" in log.read_text() for log in logs.glob("*.out")))
            print("--- SIGKILL to a worker: the other three go on, and a new one takes its seat", flush=True)
            worker_process(job, "127.0.0.2:1").kill()
            wait_until(job, "three workers", lambda: 3 in sizes_of_worlds(events))
            wait_until(job, "four workers again", lambda: sizes_of_worlds(events)[-1] == 4)
            print("--- a host is taken away: its two workers leave, and nothing is lost", flush=True)
            hosts.write_text("localhost:2\n")
            wait_until(job, "two workers", lambda: 2 in sizes_of_worlds(events))
            print("--- the host comes back", flush=True)
            hosts.write_text("localhost:2\n127.0.0.2:2\n")
            wait_until(job, "four workers at last", lambda: sizes_of_worlds(events)[-1] == 4)
            if status := job.wait(TIMEOUT_S):
                sys.exit(f"demo: the job ended with status {status}")
        finally:
            job.terminate()  # nothing happens if it has ended
    return "".join(log.read_text() for log in logs.glob("*.out"))


with tempfile.TemporaryDirectory() as name:
    accuracies = re.findall(r"test accuracy ([\d.]+)", run(Path(name)))
if len(accuracies) != 1 or float(accuracies[0]) < MIN_ACCURACY:
    sys.exit(f"demo: one test accuracy of at least {MIN_ACCURACY} was to be printed, not {accuracies}")
