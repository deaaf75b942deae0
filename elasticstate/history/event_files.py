"""Event files as they are read: one event after the other, with errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from elasticstate.errors import OptionError

Event = dict[str, Any]

_LONGEST = 64 << 20  # bytes of one line
_LARGEST = 1e15
_LATEST = 1e11  # the year 5138
_BEGINNING = b'{"time": '  # of each event; inside of a text, the quotes would be escaped
_Kinds = tuple[type, ...]
_NUMBER: _Kinds = (int, float)
_WHOLE: _Kinds = (int,)
_TEXT: _Kinds = (str,)
_LIST: _Kinds = (list,)
_OR_NULL: _Kinds = (type(None),)
_ALL: dict[str, _Kinds] = {"time": _NUMBER, "event": _TEXT, "job": _TEXT, "generation": _WHOLE}
_HOST: dict[str, _Kinds] = {"host": _TEXT}
_WORKER: dict[str, _Kinds] = {"worker": _TEXT, "host": _TEXT, "slot": _WHOLE}
_FIELDS: dict[str, dict[str, _Kinds]] = {
    "host_added": {**_HOST, "slots": _WHOLE},
    "host_removed": _HOST,
    "host_draining": {**_HOST, "reason": _TEXT},
    "host_cooldown": {**_HOST, "seconds": _NUMBER, "reason": _TEXT},
    "agent_joined": _HOST,
    "agent_lost": {**_HOST, "reason": _TEXT},
    "worker_started": _WORKER,
    "worker_ready": _WORKER,
    "worker_exited": {
        **_WORKER,
        "rank": _WHOLE + _OR_NULL,
        "exit_code": _WHOLE + _OR_NULL,
        "signal": _WHOLE + _OR_NULL,
    },
    "worker_unresponsive": {"worker": _TEXT, "reason": _TEXT},
    "end": {"cause": _TEXT, "at": _WHOLE + _TEXT},
    "hold": {"cause": _TEXT},
    "release": {"cause": _TEXT},
    "world_formed": {"size": _WHOLE, "hosts": _WHOLE, "joined": _LIST, "left": _LIST},
    "sync": {"worker": _TEXT, "bytes": _WHOLE, "seconds": _NUMBER},
    "training_resumed": {"downtime_s": _NUMBER, "ticks_lost": _WHOLE, "commits_lost": _WHOLE, "lower_bounds": _LIST},
    "stall": {"call": _TEXT, "seconds": _NUMBER, "who": _TEXT},
    "stall_ended": {"call": _TEXT, "reason": _TEXT},
    "no_tick": {"seconds": _NUMBER, "text": _TEXT},
    "no_tick_ended": {"reason": _TEXT},
    "driver_restarted": {"epoch": _WHOLE},
    "job_finished": {"status": _TEXT, "failures": _WHOLE, "downtime_s": _NUMBER + _OR_NULL, "lower_bounds": _LIST},
    "root_cause": {"reason": _TEXT},
    "replication": {"replicated": _WHOLE, "failed": _WHOLE, "seconds": _NUMBER, "bytes": _WHOLE},
    "durable_copy": {"state": _TEXT},
}
"""The fields that this package relies on. Others may be absent or new."""


def number(event: Event, name: str) -> float | None:
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
        event = _parsed(line)
        wrong = event if isinstance(event, str) else _problem(event)
        if wrong:
            raise OptionError(
                f"{path!r}: line {number} is no event ({wrong}). Name a file that elasticrun --events-file has written."
            )
        assert isinstance(event, dict)
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
    """Return the reason why a JSON value is no event; an empty text for an event."""
    if not isinstance(event, dict):
        return "not an object"
    for fields in (_ALL, _FIELDS.get(str(event.get("event")), {})):
        for name, kinds in fields.items():
            if name not in event:
                return f"no field {name!r}"
            value: Any = event[name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                return f"{name!r} is {json.dumps(value)[:60]}"
            if isinstance(value, int | float) and not abs(value) < _LARGEST:  # NaN, too
                return f"{name!r} is {str(value)[:20]}"
    return "" if 0 <= event["time"] < _LATEST else f"'time' is {event['time']}"
