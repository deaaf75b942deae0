"""Kinds of option values: a parser for each kind, and the text that describes its valid values."""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass

from elasticstate.core.ids import HostSlots

_HOST_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}"
_HOST = re.compile(
    rf"(?P<name>{_HOST_NAME}|\[[0-9A-Fa-f:.]+\])(?::(?P<slots>\d{{1,18}}))?(?P<attributes>(?:\s+[^\s=:,]+=\S*)*)"
)
RACK_RULE = "must be letters, digits, dots, dashes and underscores, and not begin with a dot"
_LONGEST_QUOTE = 100  # characters of a line that cannot be read
_INTERFACE = re.compile(r"[^\s/:,]{1,15}")  # dev_valid_name() of Linux
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of option values: its parser, and the text that describes the valid values."""

    metavar: str
    valid: str  # completes "must be ..."
    parse: Callable[[str], object]  # raises ValueError


def is_host_name(text: str) -> bool:
    """Return True if a host of a job may have this name, which appears in paths, messages and command lines.

    It may be an address.
    """
    return re.fullmatch(_HOST_NAME, text) is not None or _is_ipv6(text)


def _is_ipv6(text: str) -> bool:
    """Return True for an address of IPv6 in its shortest form, the only one that is a name of a host."""
    try:
        return str(ipaddress.IPv6Address(text)) == text and "%" not in text
    except ValueError:
        return False


def parse_host(text: str, default_slots: int) -> HostSlots:
    """Read ``host``, ``host:slots`` or ``host slots=N``, perhaps followed by ``rack=NAME``. Raises ValueError.

    An address of IPv6 is in brackets: ``[fd00::1]:4``.
    """
    quoted = repr(text.strip()[:_LONGEST_QUOTE])
    match = _HOST.fullmatch(re.sub(r"\s*=\s*", "=", text.strip()))
    if match is None:
        raise ValueError(f"{quoted} is not a host: must be host or host:slots")
    slots, rack = match["slots"], ""
    for attribute in match["attributes"].split():
        name, _, value = attribute.partition("=")
        if name == "slots" and slots is None and re.fullmatch(r"\d{1,18}", value):
            slots = value
        elif name == "rack" and not rack and is_host_name(value):
            rack = value
        elif name == "rack" and not rack:
            raise ValueError(f"{quoted}: rack={value}: {RACK_RULE}")
        elif name in ("slots", "rack"):
            raise ValueError(f"{quoted}: {attribute}: must be one {name}=, with a value")
        else:
            raise ValueError(f"{quoted}: unknown attribute {name!r}: must be slots=N or rack=NAME")
    name = match["name"]
    if name.startswith("["):
        try:
            name = str(ipaddress.IPv6Address(name[1:-1]))
        except ValueError:
            raise ValueError(f"{quoted} is not a host: {name} is no address of IPv6") from None
    return HostSlots(name, default_slots if slots is None else int(slots), rack)


def _whole(text: str, minimum: int, maximum: float = math.inf) -> int:
    value = int(text)
    if not minimum <= value <= maximum:
        raise ValueError(text)
    return value


def _seconds(text: str, minimum: float) -> float:
    value = float(text)
    if not math.isfinite(value) or value < minimum:
        raise ValueError(text)
    return value


def parse_bytes(text: str, minimum: int = 0) -> int:
    """Read ``4096``, ``512M`` or ``2G`` (powers of 1024). Raises ValueError."""
    power = "KMGT".find(text[-1:].upper()) + 1 if text else 0
    return _whole(text[:-1] if power else text, minimum) << 10 * power


def _or_off(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: None if text.lower() == "off" else parse(text)


def _yes_or_no(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    for host in hosts:
        parse_host(host, 1)
    return hosts


def _ranks(text: str) -> tuple[tuple[int, int], ...]:
    """Read ``0,4-7`` as ranges with both ends included. Raises ValueError."""
    ranges = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        ranges.append((_whole(first, 0), _whole(last or first, int(first))))
    return tuple(ranges)


def _address(text: str) -> str:
    host, port = split_address(text)
    ipaddress.ip_address(host)
    if not 0 <= port < 1 << 16:
        raise ValueError(text)
    return text


def split_address(text: str) -> tuple[str, int]:
    """Read ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``; the port is 0 if none is given. Raises ValueError."""
    match = re.fullmatch(r"(?:\[(?P<six>[^]]+)]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not an address")
    return match["six"] or match["host"], int(match["port"] or 0)


def _page_address(text: str) -> str:
    """Read ``port`` or ``address:port``. The default of the address is the loopback interface. Raises ValueError."""
    address = f"127.0.0.1:{text}" if text.isdecimal() else text
    if split_address(address)[1] == 0 and not address.endswith(":0"):
        raise ValueError(text)
    return _address(address)


def _patterns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z_*][A-Za-z0-9_*]*", name) for name in names):
        raise ValueError(text)
    return names


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(text)
    return names


_OWN_SIGNALS = (
    "INT",
    "HUP",
    "KILL",
    "STOP",
    "CONT",
    "CHLD",
    "PIPE",
    "SEGV",
    "BUS",
    "FPE",
    "ILL",
    "ABRT",
    "TRAP",
    "SYS",
)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    return tuple(dict.fromkeys(_signal(word.strip().upper().removeprefix("SIG")) for word in text.split(",")))


def _signal(word: str) -> signal.Signals:
    known = {number.name.removeprefix("SIG"): number for number in signal.Signals if number < signal.SIGRTMIN}
    found = signal.Signals(int(word)) if word.isdecimal() else known.get(word)
    if found is None or found >= signal.SIGRTMIN or found.name.removeprefix("SIG") in _OWN_SIGNALS:
        raise ValueError(word)
    return found


def _command(text: str) -> str:
    if not shlex.split(text):
        raise ValueError(text)
    return text


def _range(text: str) -> tuple[float, float]:
    low, high = (_seconds(part, 0.0) for part in text.split())
    if low > high:
        raise ValueError(text)
    return low, high


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(text)
        return text

    return parse


def _one_of(*names: str) -> Kind:
    valid = f"{', '.join(names[:-1])} or {names[-1]}"
    return Kind("|".join(names), valid, _matching(re.compile("|".join(map(re.escape, names)))))


def at_least_s(minimum: float) -> Kind:
    """Return the kind for a number of seconds from ``minimum`` on."""
    return Kind("S", f"a number of seconds, at least {minimum:g}", lambda text: _seconds(text, minimum))


COUNT = Kind("N", "a whole number, at least 1", lambda text: _whole(text, 1))
NUMBER = Kind("N", "a whole number, at least 0", lambda text: _whole(text, 0))
BYTES = Kind("BYTES", "a number of bytes, for example 4096, 512M or 2G", parse_bytes)
BYTES_OR_OFF = Kind(
    "BYTES|off",
    "a number of bytes, at least 1, for example 4096, 512M or 2G, or off",
    _or_off(lambda text: parse_bytes(text, 1)),
)
SECONDS = at_least_s(0.0)
SECONDS_OR_OFF = Kind("S|off", "a number of seconds, at least 1, or off", _or_off(lambda text: _seconds(text, 1.0)))
SECONDS_OR_NEVER = Kind(
    "S|off",
    "a number of seconds, at least 1, or 0 or off",
    _or_off(lambda text: _seconds(text, 1.0) if float(text) else None),
)
LEASE = Kind("S|off", "a number of seconds, at least 3, or off", _or_off(lambda text: _seconds(text, 3.0)))
LIMIT_OR_OFF = Kind("N|off", "a whole number, at least 0, or off", _or_off(lambda text: _whole(text, 0)))
STRAGGLER_ACTION = _one_of("warn", "drain")
DIVERGENCE = _one_of("off", "warn", "restore")
BIND = _one_of("none", "numa", "cores")
HOSTS = Kind("H1:4,H2:4", "host or host:slots, perhaps with rack=NAME, separated by commas", _hosts)
SLOTS = Kind("N|auto", "a whole number, at least 1, or auto", lambda t: 0 if t == "auto" else _whole(t, 1))  # auto: 0
PATH = Kind("PATH", "a path", _matching(re.compile(r".+")))
BACKENDS = ("nccl", "nccl2", "gloo", "mpi")  # the table of their parts is in backends.py
BACKEND = _one_of("auto", *BACKENDS)
RANGE = Kind("MIN MAX", "two times in seconds, the smaller one first", _range)
SIGNALS = Kind(
    "SIGNALS",
    "names or numbers of signals, separated by commas, but none that elasticstate or the system uses: "
    f"SIG{', SIG'.join(_OWN_SIGNALS)} and the real-time signals",
    _signals,
)
COMMAND = Kind("COMMAND", "a command with its arguments, quoted as for a shell", _command)
FLAG = Kind("", "1 or 0", _yes_or_no)
PORT = Kind("PORT", "a port number from 1 to 65535", lambda text: _whole(text, 1, 65535))
MODULES_OR_OFF = Kind("MODULES|off", "names of Python modules, separated by commas, or off", _or_off(_modules))
INTERFACES = Kind(
    "NAMES",
    "names of network interfaces, separated by commas",
    lambda text: tuple(_matching(_INTERFACE)(name.strip()) for name in text.split(",")),
)
NAMES = Kind("NAMES", "names of environment variables, separated by commas; * matches any characters", _patterns)
ADDRESS = Kind("ADDR[:PORT]", "an IP address of this machine (0.0.0.0 or [::]: all), with or without a port", _address)
PAGE = Kind(
    "[ADDR:]PORT", "a port (0: chosen by the system), perhaps after an IP address of this machine", _page_address
)
STREAMS = Kind("0|1|2|3", "0, 1 (stdout), 2 (stderr) or 3 (both)", lambda text: _whole(text, 0, 3))
RANKS = Kind("RANKS", "ranks and ranges of ranks, separated by commas, for example 0,4-7", _ranks)
SELECTOR = Kind("SELECTOR", "a label selector, for example app=agents", _matching(re.compile(r"\S.*")))
NAME = Kind(
    "NAME", "up to 40 letters, digits, dots, dashes and underscores, beginning with no dot or dash", _matching(_JOB)
)
