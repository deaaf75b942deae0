"""This machine: its slots, its name, and the version that is installed on it."""

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
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("elasticstate")
    except PackageNotFoundError:
        return "0+source"
