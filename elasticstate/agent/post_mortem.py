"""Why a worker has ended, as far as its host can tell: error file, end of stderr, OOM kills that were counted."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from elasticstate import error_file
from elasticstate.agent.worker_process import Ending

_CGROUPS = Path("/sys/fs/cgroup")


def cause_of_death(ending: Ending, error_path: str, oom_kills: int, oom_kills_before: int) -> tuple[str, int]:
    """In words, and when it was, in unix nanoseconds. The exception that the worker wrote down comes first; then the
    end of stderr, which is the stack of the fault after SIGSEGV and its like (faulthandler)."""
    error = error_file.read(error_path) if ending.exit_code != 0 else None
    if error is not None:
        return error
    text = error_file.shortened(ending.last_words) if ending.exit_code != 0 else ""
    if ending.signal == signal.SIGKILL and oom_kills > oom_kills_before:
        killed = f"out of memory: its memory cgroup has counted {oom_kills - oom_kills_before} OOM kill(s) meanwhile"
        text = f"{text}\n{killed}" if text else killed
    return text, time.time_ns()


def count_oom_kills(groups: Path = Path("/proc/self/cgroup"), mounted: Path = _CGROUPS) -> int:
    """OOM kills in the memory cgroup that this process is in, with all below it; 0 where there is none to ask.

    See cgroups(7); memory.events of version 2, memory.oom_control of version 1.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
        for _, controllers, path in lines:
            if "memory" in controllers.split(","):
                return _counted(mounted / "memory" / path.lstrip("/") / "memory.oom_control")
        for _, controllers, path in lines:
            if not controllers:
                return _counted(mounted / path.lstrip("/") / "memory.events")
    except (OSError, ValueError):
        pass
    return 0


def _counted(events: Path) -> int:
    counts = dict(line.split(" ", 1) for line in events.read_text().splitlines())
    return int(counts.get("oom_kill", 0))
