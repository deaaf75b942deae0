"""A demonstration of failures: runs digits.py with four workers on two local host names, and disturbs the job.

The demo kills a worker with SIGKILL, removes a host and adds the host again. The training continues all the time and
reaches its accuracy. The exit status is 0 if all of that happened. ``make demo`` runs this script.
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
    """Return the sizes of all worlds so far, read from the event file (one JSON object per line)."""
    events = map(json.loads, events_file.read_text().split("\n")[:-1])  # the last line may be incomplete
    return [event["size"] for event in events if event["event"] == "world_formed"]


def worker_process(job: subprocess.Popen[bytes], slot_id: str) -> psutil.Process:
    """Return the process of the worker in a slot (host:slot)."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # discovery scripts among the children end at any time
            if process.environ().get("ELASTICSTATE_WORKER", "").startswith(f"{slot_id}:"):
                return process
    sys.exit(f"demo: no worker runs in {slot_id}")


def run(folder: Path) -> str:
    """Run the job, disturb it, and return the output of the workers."""
    hosts, events, logs = folder / "hosts", folder / "events", folder / "logs"
    hosts.write_text("localhost:2\n127.0.0.2:2\n")
    options = ["-np", "4", "--min-np", "2", "--max-np", "4", "--min-interrupt-distance", "1", "--log-dir", logs]
    options += ["--events-file", events, "--host-discovery-script", EXAMPLES / "discover.sh"]
    options += ["--preload", "sklearn.datasets,sklearn.model_selection"]  # each host imports them once
    command = [ELASTICRUN, *options, sys.executable, "-u", EXAMPLES / "digits.py", "--epochs", "14", "--pace", "0.08"]
    with subprocess.Popen(command, env=os.environ | {"HOSTS_FILE": str(hosts)}) as job:
        try:
            wait_until(job, "the first epochs", lambda: any("epoch 5" in log.read_text() for log in logs.glob("*.out")))
            print("--- SIGKILL to a worker: the other three go on, and a new worker takes its slot", flush=True)
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
            job.terminate()  # no effect if the job has ended
    return "".join(log.read_text() for log in logs.glob("*.out"))


with tempfile.TemporaryDirectory() as name:
    accuracies = re.findall(r"test accuracy ([\d.]+)", run(Path(name)))
if len(accuracies) != 1 or float(accuracies[0]) < MIN_ACCURACY:
    sys.exit(f"demo: one test accuracy of at least {MIN_ACCURACY} was to be printed, not {accuracies}")
print(f"--- the job has survived all of this, and has reached a test accuracy of {accuracies[0]}")
