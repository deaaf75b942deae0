"""Report of callbacks that block an event loop, apart from those that a loaded machine delays.

asyncio's own ``slow_callback_duration`` measures wall-clock time, which includes the load of the machine. Here a
callback is slow if its thread computed, or slept in a blocking call, for longer than the limit. The kernel reports how
long the thread was ready to run and had no core (/proc/PID/schedstat; Documentation/scheduler/sched-stats.rst), and how
long other virtual machines had the cores of this one ("steal" in proc_stat(5)). Another thread may hold the
interpreter's lock while it has no core, so the waits of all Python threads for a core do not count, except those of a
thread that has ended by the end of the callback: they are not known any more. The start of a process or a thread does
not count, neither its wait for a core of the new one (vfork(2); threading.Thread.start) nor its work in the kernel. Nor
does the work of waitpid(2): the kernel removes the files of the ended process in /proc, for whose locks all readers of
/proc compete. Its wait for a process that lives does count.
"""

from __future__ import annotations

import _thread
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from asyncio import Handle, Task
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW_S = 0.1
"""Limit in seconds: a longer callback is reported."""

_READ_INTERVAL_S = 0.001
"""Callbacks that begin so soon after one another begin with the same readings of the kernel's counters."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def watch_loops(path: str) -> None:
    """Append a line to the file at ``path`` for each slow callback of this thread's event loops, from now on.

    No public hook surrounds the callbacks of an event loop: this replaces ``asyncio.Handle._run`` (Python 3.11).
    """
    run = Handle._run  # type: ignore[attr-defined]
    schedule = _Schedule()
    cores = os.open("/proc/stat", os.O_RDONLY | os.O_CLOEXEC)
    report = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    continued_at = starting_s = starting_cpu_s = read_at = waited = stolen = 0.0
    others_waited: dict[int, float] = {}
    page_faults = 0
    witness, own = _Witness(), threading.get_ident()

    def note_continued(*_: object) -> None:
        nonlocal continued_at
        continued_at = time.monotonic()

    def stolen_s() -> float:
        return int(os.pread(cores, 200, 0).split(maxsplit=9)[8]) / _TICKS_PER_S

    def timed(start: Callable[..., object], its_waits: bool = True) -> Callable[..., object]:
        def timed_start(*arguments: Any, **named: Any) -> object:
            nonlocal starting_s, starting_cpu_s
            computed, began = time.thread_time(), time.monotonic()
            try:
                return start(*arguments, **named)
            finally:
                computed = time.thread_time() - computed
                starting_s += time.monotonic() - began if its_waits else computed
                starting_cpu_s += computed

        return timed_start

    def watched(handle: Handle) -> None:
        nonlocal starting_s, starting_cpu_s, read_at, others_waited, waited, stolen, page_faults
        if threading.get_ident() != own:  # a loop of fsspec
            run(handle)
            return
        starting_s = starting_cpu_s = 0.0
        # The wait for a core is read first and last: else a wait between two of the readings would count as blocked.
        if time.monotonic() > read_at + _READ_INTERVAL_S:
            others_waited, waited = schedule.others_without_core_s(), schedule.without_core_s()
            stolen, page_faults = stolen_s(), _major_page_faults()
            read_at = time.monotonic()
        computed, began = time.thread_time(), time.monotonic()
        witness.begins()
        run(handle)
        seen = witness.ends()
        lasted = time.monotonic() - began - starting_s
        if lasted > SLOW_S:
            time.sleep(0.02)  # another thread may have got a SIGCONT, of which this one has not heard yet
        if lasted > SLOW_S and continued_at < began:  # time under SIGSTOP is not time in a blocking call
            computed = time.thread_time() - computed - starting_cpu_s
            taken_s = stolen_s() - stolen
            waited_s = schedule.without_core_s() - waited
            others_waited_s = _increase_of_all(others_waited, schedule.others_without_core_s())
            blocked = lasted - computed - waited_s - others_waited_s - taken_s
            if max(computed, blocked) > SLOW_S:
                times = f"{lasted:.3f} s: computed {computed:.3f}, blocked {blocked:.3f}, stolen {taken_s:.2f}"
                times += f", without a core {waited_s:.3f}, other threads {others_waited_s:.3f}"
                times += f"; {_major_page_faults() - page_faults} major page faults"
                process = f"{os.getpid()} {' '.join(sys.argv)[-200:]}"
                os.write(report, f"{times}; {seen or 'not seen'}; {process}: {_named(handle)}\n".encode())

    starters: list[tuple[Any, str]] = [(subprocess.Popen, "__init__"), (threading.Thread, "start")]
    starters += [(_thread, "start_new_thread"), (os, "waitpid")]
    for kind, name in starters:
        setattr(kind, name, timed(getattr(kind, name), its_waits=kind is not os))
    signal.signal(signal.SIGCONT, note_continued)
    Handle._run = watched  # type: ignore[attr-defined]


class _Witness:
    """Where the loop's thread is in a long callback, as another thread sees it. Create it on the loop's thread."""

    def __init__(self) -> None:
        self._loop, self._native = threading.get_ident(), threading.get_native_id()
        self._number, self._began_at, self._seen = 0, 0.0, ""
        threading.Thread(target=self._look, name="witness of slow callbacks", daemon=True).start()

    def begins(self) -> None:
        self._number, self._began_at, self._seen = self._number + 1, time.monotonic(), ""

    def ends(self) -> str:
        """Return what was seen of this callback: its lines of code, and the system call that it was in."""
        self._began_at, seen = 0.0, self._seen
        return seen

    def _look(self) -> None:
        while True:
            time.sleep(SLOW_S / 2)
            number, began = self._number, self._began_at
            if began and not self._seen and time.monotonic() > began + SLOW_S / 4:
                seen = f"{self._lines_of_code()}; {self._place_in_kernel()}"
                if number == self._number:
                    self._seen = seen

    def _lines_of_code(self) -> str:
        frame, places = sys._current_frames().get(self._loop), []
        while frame is not None and len(places) < 6:
            places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return " < ".join(places)

    def _place_in_kernel(self) -> str:
        try:
            parts = [Path(f"/proc/self/task/{self._native}/{name}").read_text() for name in ("syscall", "stack")]
        except OSError as error:  # the stack is for root
            return str(error)
        return " ".join(" ".join(parts).split())


class _Schedule:
    """For how long the threads of this process were ready to run and had no core. Create it on the loop's thread."""

    def __init__(self) -> None:
        self._own = threading.get_native_id()
        self._files: dict[int, int] = {}

    def without_core_s(self) -> float:
        """Return the time of the loop's thread."""
        return self._read(self._own)

    def others_without_core_s(self) -> dict[int, float]:
        """Return the times of all other Python threads."""
        living = {thread.native_id for thread in threading.enumerate()} - {self._own, None}
        for ended in self._files.keys() - living - {self._own}:
            os.close(self._files.pop(ended))
        return {thread: self._read(thread) for thread in living if thread is not None}

    def _read(self, thread: int) -> float:
        try:
            if thread not in self._files:
                path = f"/proc/self/task/{thread}/schedstat"
                self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._files[thread], 100, 0).split()[1]) / 1e9
        except OSError:  # the thread has just ended
            return 0.0


def _increase_of_all(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in after.items())


def _major_page_faults() -> int:
    """Return the number of pages of this thread that the kernel had to read from a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _named(handle: Handle) -> str:
    """Return a description of the callback; of a step of a task, that of the task."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return repr(task if isinstance(task, Task) else handle)
