"""Facts about this machine (slots, name, installed version), and sizes as text."""

from __future__ import annotations

import os
from glob import glob


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
