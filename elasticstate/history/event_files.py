"""Files of the commands trace, report and verify: event files as they are read, and the output, whole or not there."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypedDict, TypeVar, get_type_hints

import msgspec

from elasticstate.core import event_file
from elasticstate.errors import OptionError
from elasticstate.private import write_file

_LONGEST = 64 << 20  # bytes of one line
_LARGEST = 1e15  # of a number that is no time of a host in nanoseconds
_LATEST = 1e11  # the year 5138
_BEGINNING = b'{"time": '  # of each event; inside of a text, the quotes would be escaped


class Event(dict[str, Any]):
    """One line of an event file. A field that the line lacks raises OptionError, with the place of the line."""

    def __init__(self, fields: dict[str, Any], place: str, line: int) -> None:
        super().__init__(fields)
        self._place = place
        self.line = line

    def __missing__(self, name: str) -> Any:
        raise self.error(f"no field {name!r}")

    def error(self, problem: str) -> OptionError:
        """Return the error for a line that is no event."""
        return OptionError(
            f"{self._place} is no event ({problem}). Name a file that elasticrun --events-file has written."
        )


def number(event: Mapping[str, object], name: str) -> float | None:
    """Return a number that an event may have, or None."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def read_events(path: str) -> Iterator[Event]:
    """Yield the events of a file in its order.

    A last line without its end is left out: the job still writes it, or was killed. Raises OptionError for a file that
    cannot be read, or a line that is no event.
    """
    try:
        with open(path, "rb") as file:
            yield from _events(path, file)
    except OSError as error:
        raise OptionError(
            f"{path!r}: cannot be read ({error.strerror}). Name a file that elasticrun --events-file has written."
        ) from None


def _events(path: str, file: BinaryIO) -> Iterator[Event]:
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        if not line.endswith(b"\n") and len(line) < _LONGEST:
            return
        if line.isspace():
            continue
        value = _parsed(line)
        event = Event(value if isinstance(value, dict) else {}, f"{path!r}: line {number}", number)
        if wrong := value if isinstance(value, str) else _problem(value):
            raise event.error(wrong)
        yield event


def _parsed(line: bytes) -> object:
    """Return the JSON value of a line. A text says what is wrong.

    A driver that was killed may have left half an event, to which the next driver's first event was appended.
    """
    try:
        value = json.loads(line.decode(), parse_constant=_reject)
    except (ValueError, RecursionError) as error:
        begin = line.rfind(_BEGINNING)
        return _parsed(line[begin:]) if begin > 0 else f"not JSON: {error}"
    return "not an object" if isinstance(value, str) else value


def _reject(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _problem(event: Any) -> str:
    """Return the reason why a JSON value is no event; an empty text for an event. Other versions of elasticrun may
    have written fewer fields, or others."""
    if not isinstance(event, dict):
        return "not an object"
    for name in ("time", "event", "job", "generation"):
        if name not in event:
            return f"no field {name!r}"
    try:
        msgspec.convert(event, _any_fields_of(str(event["event"])))
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)", str(error))
        name = found[1] if found else "event"
        return f"{name!r} is {json.dumps(event[name])[:60]}"
    for name, value in event.items():
        if isinstance(value, int | float) and not name.endswith("_ns") and not abs(value) < _LARGEST:  # NaN, too
            return f"{name!r} is {str(value)[:20]}"
    return "" if 0 <= event["time"] < _LATEST else f"'time' is {event['time']}"


@cache
def _any_fields_of(name: str) -> Any:
    """Return the type of an event from which fields may be absent."""
    event = event_file.by_name().get(name, event_file.CommonFields)
    return TypedDict("Event", get_type_hints(event), total=False)  # type: ignore[operator]


class _Run(Protocol):
    def add(self, e: Event) -> None: ...

    def close(self) -> None:
        """The file has no further event of this run."""


R = TypeVar("R", bound=_Run)


def runs_of(events: Iterable[Event], begin: Callable[[Event], R]) -> list[R]:
    """Give each event to its run of a job; ``begin`` makes one from its first event. Return all, by their beginning.

    A ``job_started`` begins a new run; a driver that reattaches continues the run.
    """
    found: list[R] = []
    newest: dict[str, R] = {}
    for event in events:
        job = event["job"]
        if job not in newest or event["event"] == "job_started":
            newest[job] = begin(event)
            found.append(newest[job])
        try:
            newest[job].add(event)
        except ValueError:
            raise event.error(f"'worker' is {event.get('worker')!r}") from None
    for run in found:
        run.close()
    return found


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
