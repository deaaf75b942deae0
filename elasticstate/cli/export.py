"""``elasticrun export PLACE``: the tensors of a durable copy, in one safetensors file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elasticstate.cli.parser import file_parser
from elasticstate.durable.durable_storage import absolute, is_url, refuse
from elasticstate.durable.export import NothingToExportError, export
from elasticstate.durable.stored_copies import (
    DamagedCopyError,
    Manifest,
    StorageHangsError,
    StoredCopies,
    failure_of,
    milliseconds_of,
)
from elasticstate.errors import OptionError
from elasticstate.history.event_files import check_output
from elasticstate.machine import format_bytes
from elasticstate.terminal import complain, printable

_TIMEOUT_S = 60.0

_DESCRIPTION = """\
Write the tensors of a durable copy to one safetensors file.

PLACE is what a job had as --durable-dir, or one copy in it (PLACE/commit-...). Of several copies, the newest complete
one of this user, or of the directory's owner, is exported. The file has full tensors, also if the copy consists of
shards. With --value, the names are those in the value: for a module, the names of its state_dict(). The checksums of
all bytes are verified."""

_END = """\
examples:
  elasticrun export s3://bucket/run -o state.safetensors
  elasticrun export /shared/run -o model.safetensors --value model
  python -c "from safetensors.torch import load_file; print(load_file('model.safetensors').keys())"

Exit status: 0 written; 1 there is no complete copy, or it cannot be read; 2 usage."""


def main(argv: Sequence[str]) -> int:
    """Export a copy (``elasticrun export``). Return the exit status. Raises OptionError."""
    parser = file_parser("export", _DESCRIPTION, _END)
    parser.add_argument("place", metavar="PLACE", help="Directory or URL of the copies, or of one copy.")
    parser.add_argument("--value", metavar="NAME", help="Write only the tensors of this value of the state.")
    given = parser.parse_args(argv)
    check_output(given.output, ())
    if reason := refuse(given.place):
        raise OptionError(f"export: {given.place!r}: {reason}.")
    place, name = _split(given.place)
    try:
        return _export(place, name, given.output, given.value)
    except NothingToExportError as error:
        values = ", ".join(error.values) or "none"
        raise OptionError(f"--value: {given.value!r}: the copy has no such tensors, only of {values}") from None
    except (DamagedCopyError, StorageHangsError) as error:
        complain("elasticrun", f"export: {given.place}: {error}")
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of the storage, of its library, or of the output
        complain("elasticrun", f"export: {failure_of(error)[1]}")
    return 1


def _split(text: str) -> tuple[str, str]:
    """Return the place of the copies, and the name of the copy; "" if none is named."""
    place = absolute(text).rstrip("/")
    before, _, last = place.rpartition("/")
    return (before, last) if milliseconds_of(last) is not None else (place, "")


def _export(place: str, name: str, output: str, value: str | None) -> int:
    # No pickle is read. Whoever names a copy knows whose it is.
    copies = StoredCopies(place, _TIMEOUT_S, owners=None if name else _owner_of(place))
    name, manifest = (name, copies.manifest(name)) if name else _newest(copies)
    with _progress(sum(part.data_bytes for part in manifest.parts)) as progress:
        count = export(copies, name, manifest, output, value, progress)
    size = format_bytes(os.path.getsize(output))
    sys.stdout.write(
        printable(f"{output}: {count} tensors, {size}, of {name} (job {manifest.job}, commit {manifest.commit})\n")
    )
    return 0


def _owner_of(place: str) -> tuple[int, ...]:
    """Return the owner of a directory, whose copies in it are exported, too."""
    try:
        return () if is_url(place) else (os.stat(place).st_uid,)
    except OSError:
        return ()


def _newest(copies: StoredCopies) -> tuple[str, Manifest]:
    """Return the newest complete copy. Raises DamagedCopyError if there is none."""
    names = copies.names()
    for name in names:
        try:
            return name, copies.manifest(name)
        except DamagedCopyError as error:  # noqa: PERF203
            complain("elasticrun", f"export: {name} is skipped: {error}")
    raise DamagedCopyError("none of its copies is complete" if names else "has no durable copy")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal. The value is called with the number of new bytes."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)
        yield lambda size: shown.advance(task, size)
