"""The output file of a command: whole, or not there."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticstate.errors import OptionError
from elasticstate.private import write_file


def check_output(path: str, sources: Sequence[str]) -> None:
    """Check, before any work, that the output file can be written. Raises OptionError."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise OptionError(f"-o/--output: {path!r}: {str(folder)!r} is not a directory. Make it, or name another file.")
    with suppress(OSError):
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OptionError(f"-o/--output: {path!r}: is not a regular file. Name another file.")
        if any(os.path.samestat(found, os.stat(source)) for source in sources if os.path.exists(source)):
            raise OptionError(f"-o/--output: {path!r}: is an event file. Name another file.")


def write_output(path: str, sources: Sequence[str], data: bytes) -> None:
    """Replace the output file atomically. Those who may read the event files may read it. Raises OptionError."""
    where = Path(path)
    mode = 0o666
    try:
        for source in sources:
            mode &= os.stat(source).st_mode
        folder = os.open(where.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            write_file(folder, where.name, data, mode | 0o600)
        finally:
            os.close(folder)
    except OSError as error:
        raise OptionError(
            f"-o/--output: {path!r}: cannot be written ({error.strerror}). Name a file that this user can write."
        ) from None
