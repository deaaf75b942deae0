"""Use of this host: processors and memory from /proc, or from the agent's control group if that has limits; GPUs from
NVIDIA's management library (NVML), which its driver installs. No CUDA context is made."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elasticstate.machine import cores_of_this_machine, gpus_of_this_machine
from elasticstate.net.messages import HostUse

INTERVAL_S = 2.0
"""Seconds between two measurements."""
_NVML = "libnvidia-ml.so.1"
_GROUPS = Path("/sys/fs/cgroup")  # where version 2 is mounted


class _Times(NamedTuple):
    """Seconds of processor time that were used and that were available, since some moment in the past."""

    used_s: float
    available_s: float


class Meter:
    """Measures the use of this host. Its calls may block: a GPU that has failed may not answer."""

    def __init__(self, gpu_library: str = _NVML, groups: Path = _GROUPS, proc: Path = Path("/proc")) -> None:
        self._groups, self._proc = groups, proc
        self._open_gpus: Callable[[], Gpus | None] = lambda: open_gpus(gpu_library)
        self._gpus: Gpus | None = None
        self._is_open = False
        self._last: _Times | None = None

    def measure(self) -> HostUse:
        """Return the use; that of the processors since the last call. Raises OSError."""
        if not self._is_open:
            self._is_open, self._gpus = True, self._open_gpus()
        last, self._last = self._last, self._times()
        cpu = None
        if last is not None and self._last.available_s > last.available_s:
            cpu = (self._last.used_s - last.used_s) / (self._last.available_s - last.available_s)
        memory, total = self._memory()
        use = HostUse(None if cpu is None else min(1.0, max(0.0, round(cpu, 3))), memory, total)
        return use if self._gpus is None else self._gpus.added_to(use)

    def _times(self) -> _Times:
        for group in self._own_groups():
            quota, _, period = _read(group / "cpu.max").partition(" ")
            if quota.isdecimal() and period:
                cores = min(int(quota) / int(period), cores_of_this_machine())
                used_us = _field(_read(group / "cpu.stat"), "usage_usec")
                return _Times(used_us / 1e6, time.monotonic() * cores)
        # user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user
        ticks = [int(number) for number in (self._proc / "stat").read_text().splitlines()[0].split()[1:9]]
        hertz = os.sysconf("SC_CLK_TCK")
        return _Times((sum(ticks) - ticks[3] - ticks[4]) / hertz, sum(ticks) / hertz)

    def _memory(self) -> tuple[int, int]:
        """Return the bytes that are used, without the cache of files, and all."""
        text = (self._proc / "meminfo").read_text()
        total, free = (1024 * _field(text, name) for name in ("MemTotal:", "MemAvailable:"))
        for group in self._own_groups():
            limit = _read(group / "memory.max")
            if limit.isdecimal() and int(limit) < total:
                cache = _field(_read(group / "memory.stat"), "inactive_file")
                return max(0, int(_read(group / "memory.current") or 0) - cache), int(limit)
        return total - free, total

    def _own_groups(self) -> Iterator[Path]:
        """Yield the control groups of this process, from its own one up: a parent may have the limit."""
        lines = _read(self._proc / "self" / "cgroup").splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "")
        group = self._groups / path.lstrip("/")
        while path and group != self._groups.parent:
            yield group
            group = group.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _field(text: str, name: str) -> int:
    """Return the number behind a name at the beginning of a line; 0 if there is none."""
    found = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in found if len(words) > 1 and words[0] == name), 0)


# ----------------------------------------------------------------------------------------------------------------- GPUs
# Functions and structures: https://docs.nvidia.com/deploy/nvml-api/


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The NVIDIA GPUs of this host."""

    def __init__(self, library: ctypes.CDLL, devices: list[ctypes.c_void_p]) -> None:
        self._library = library
        self._devices = devices

    def added_to(self, use: HostUse) -> HostUse:
        """Return the use of the host with that of its GPUs. A GPU that gives no number is left out of this number."""
        shares, used, total = [], 0, 0
        for device in self._devices:
            share, memory = _Utilization(), _Memory()
            if self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(share)) == 0:
                shares.append(share.gpu / 100)
            if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                used, total = used + memory.used, total + memory.total
        mean = round(sum(shares) / len(shares), 3) if shares else None
        return use._replace(gpus=len(self._devices), gpu=mean, gpu_memory_bytes=used, gpu_memory_total_bytes=total)


def open_gpus(library_name: str) -> Gpus | None:
    """Return the GPUs of this host; None if there are none, or no library."""
    if library_name == _NVML and not gpus_of_this_machine():
        return None
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(library_name)
        count = ctypes.c_uint()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                devices.append(device)
        return Gpus(library, devices) if devices else None
    return None
