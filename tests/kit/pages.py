"""Control pages opened by file name, for tests that read a page next to the process that owns it."""

from __future__ import annotations

import os
from pathlib import Path

from elasticstate._native import ControlPage


def page_at(path: Path | str) -> ControlPage:
    """Open the page in a file. Raises OSError if it does not exist."""
    fd = os.open(path, os.O_RDWR)
    try:
        return ControlPage(fd)
    finally:
        os.close(fd)
