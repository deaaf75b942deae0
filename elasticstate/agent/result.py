"""What a worker of ``launch()`` has returned, part by part."""

from __future__ import annotations

import os

from elasticstate.net import messages

_PART_BYTES = 1 << 20


def part_of_result(path: str, slot: int, offset: int) -> messages.Fetched:
    """From ``offset`` on. Nothing was returned where there is no file."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return messages.Fetched(slot, offset, file.read(_PART_BYTES), os.fstat(file.fileno()).st_size)
    except OSError:
        return messages.Fetched(slot, offset, b"", 0)
