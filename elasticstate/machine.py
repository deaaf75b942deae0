"""Facts about this machine (slots, name, Python, installed version), and sizes as text."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from glob import glob
from pathlib import Path


def slots_of_this_machine() -> int:
    """Return the number of its NVIDIA GPUs; without any GPU, of the cores that this process may use."""
    return gpus_of_this_machine() or cores_of_this_machine()


def gpus_of_this_machine() -> int:
    """Return the number of its NVIDIA GPUs."""
    return len(glob("/dev/nvidia[0-9]*"))


def cores_of_this_machine() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_name() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


@cache
def boot_id() -> str:
    """Return an identity of the time since this machine has started (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_python(program: str) -> bool:
    """Return True if the name of a program is that of an interpreter: python, python3, python3.12."""
    return bool(re.fullmatch(r"python[0-9.]*", os.path.basename(program)))


def is_this_python(program: str) -> bool:
    """Return True for this process's interpreter: the same program in the same virtual environment."""
    same_directory = os.path.realpath(os.path.dirname(program)) == os.path.realpath(os.path.dirname(sys.executable))
    return same_directory and os.path.realpath(program) == os.path.realpath(sys.executable)


def version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version as installed

    try:
        return installed("elasticstate")
    except PackageNotFoundError:
        return "0+source"


def format_bytes(size_bytes: int) -> str:
    """Return a size as text, for example ``3.2 GB``."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes} bytes"
