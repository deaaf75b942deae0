"""Cause of a worker's end, as far as its host can detect it: from error file, end of stderr, and OOM kill counter."""

from __future__ import annotations

import re
import signal
import time
from functools import cache
from pathlib import Path

from elasticstate import error_file
from elasticstate.agent.worker_process import Ending
from elasticstate.error_file import WorkerError
from elasticstate.exit_status import NO_GROUP_HINT, NO_WORLD_HINT, OUT_OF_MEMORY

_CGROUPS = Path("/sys/fs/cgroup")

# Error texts of torch's env:// rendezvous (torch/distributed/rendezvous.py, 2.13), which init_process_group(),
# init_device_mesh() and fully_shard() use, and of os.environ["RANK"]. Only the text can be checked: a script written
# for torchrun need not import elasticstate before it reads these variables.
_NO_WORLD = re.compile(
    r"(environment variable |KeyError: ')(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"( expected, but not set|'$)",
    re.MULTILINE,
)

# DistributedDataParallel and most functions of torch.distributed. torch's own advice fits scripts without run only.
_NO_GROUP = "Default process group has not been initialized"


def cause_of_death(
    ending: Ending, written: WorkerError | None, oom_kills: int, oom_kills_before: int
) -> tuple[str, int]:
    """Return the cause as text, and its time in unix nanoseconds.

    The exception that the worker wrote down comes first. Without one, the cause is the end of stderr, which after
    SIGSEGV and similar signals is the stack of the fault (faulthandler).
    """
    if written is not None and ending.exit_code != 0:
        return _with_hint(written.text), written.time_ns
    text = error_file.shortened(ending.last_output) if ending.exit_code != 0 else ""
    if ending.signal == signal.SIGKILL and oom_kills > oom_kills_before:
        count = oom_kills - oom_kills_before
        killed = f"{OUT_OF_MEMORY}: its memory cgroup counted {count} OOM kill(s) while the worker ran"
        text = f"{text}\n{killed}" if text else killed
    return _with_hint(text), time.time_ns()


def _with_hint(text: str) -> str:
    """Append advice to the error text if the worker expected a world where none exists."""
    hint = NO_WORLD_HINT if _NO_WORLD.search(text) else NO_GROUP_HINT if _NO_GROUP in text else ""
    return f"{text.rstrip()}\n{hint}" if hint else text


def count_oom_kills(groups: Path = Path("/proc/self/cgroup"), mounted: Path = _CGROUPS) -> int:
    """Count OOM kills in the memory cgroup of this process, with all cgroups below it; 0 if there is no counter.

    See cgroups(7); memory.events of version 2, memory.oom_control of version 1.
    """
    try:
        counter = _oom_counter(groups, mounted)
        return _read_oom_kills(counter) if counter is not None else 0
    except (OSError, ValueError):
        return 0


@cache
def _oom_counter(groups: Path, mounted: Path) -> Path | None:
    """Return the file with the counter. A read of ``groups`` waits for every change of a cgroup, so it is read once."""
    lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return mounted / "memory" / path.lstrip("/") / "memory.oom_control"
    for _, controllers, path in lines:
        if not controllers:
            return mounted / path.lstrip("/") / "memory.events"
    return None


def _read_oom_kills(events: Path) -> int:
    counts = dict(line.split(" ", 1) for line in events.read_text().splitlines())
    return int(counts.get("oom_kill", 0))
