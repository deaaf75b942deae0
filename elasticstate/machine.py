"""This machine: its slots, its name, and the version that is installed on it; sizes in words."""

from __future__ import annotations

import os
from glob import glob


def slots_of_this_machine() -> int:
    """Its NVIDIA GPUs; without any, the cores that this process may use."""
    return len(glob("/dev/nvidia[0-9]*")) or len(os.sched_getaffinity(0))


def host_name() -> str:
    """What this machine calls itself."""
    return os.uname().nodename


def version() -> str:
    """The version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version as installed

    try:
        return installed("elasticstate")
    except PackageNotFoundError:
        return "0+source"


def in_words(size_bytes: int) -> str:
    """``3.2 GB``."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes} bytes"
