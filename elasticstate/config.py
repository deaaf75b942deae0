"""The options: one frozen dataclass, from which parser (cli.py), help, environment twins and policy are derived.

This module is the only one of the package that reads ``os.environ``.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elasticstate.core.types import HostSlots, Policy, WorkerId
from elasticstate.errors import OptionError

PREFIX = "ELASTICSTATE_"
_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?::(?P<a>\d+)|\s+slots\s*=\s*(?P<b>\d+))?")
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the values of an option look like: how one is read, and the words that say what it takes."""

    metavar: str
    takes: str
    parse: Callable[[str], object]  # raises ValueError


@dataclass(frozen=True, slots=True)
class Names:
    """How an option is called, where the help shows it, and its line there."""

    names: tuple[str, ...]
    kind: Kind
    group: str
    help: str

    @property
    def twins(self) -> tuple[str, ...]:
        """The environment variables that stand for it: one for each long name."""
        return tuple(PREFIX + name[2:].replace("-", "_").upper() for name in self.names if name.startswith("--"))


def parse_host(text: str, default_slots: int) -> HostSlots:
    """Read ``host``, ``host:slots`` or ``host slots=N``. Raises ValueError."""
    match = _HOST.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text.strip()!r} is no host: takes host or host:slots")
    slots = match["a"] or match["b"]
    return HostSlots(match["name"], default_slots if slots is None else int(slots))


def _whole(text: str, minimum: int) -> int:
    value = int(text)
    if value < minimum:
        raise ValueError(text)
    return value


def _seconds(text: str, minimum: float) -> float:
    value = float(text)
    if not math.isfinite(value) or value < minimum:
        raise ValueError(text)
    return value


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


def _at_least_s(minimum: float) -> Kind:
    return Kind("S", f"seconds, at least {minimum:g}", lambda text: _seconds(text, minimum))


_COUNT = Kind("N", "a whole number, at least 1", lambda text: _whole(text, 1))
_SECONDS = _at_least_s(0.0)
_SECONDS_OR_OFF = Kind("S|off", "seconds, at least 1, or off", _or_off(lambda text: _seconds(text, 1.0)))
_LIMIT_OR_OFF = Kind("N|off", "a whole number, at least 0, or off", _or_off(lambda text: _whole(text, 0)))
_HOSTS = Kind("H1:4,H2:4", "host or host:slots, with commas between", _hosts)
_SLOTS = Kind("N|auto", "a whole number, at least 1, or auto", lambda t: None if t == "auto" else _whole(t, 1))
_PATH = Kind("PATH", "a path", _matching(re.compile(r".+")))
_BACKEND = Kind("auto|gloo", "auto or gloo (nccl and mpi come later)", _matching(re.compile("auto|gloo")))
_RANGE = Kind("MIN MAX", "two times in seconds, the smaller one first", _range)
FLAG = Kind("", "1 or 0", _yes_or_no)
_NAME = Kind("NAME", "up to 40 letters, digits, dots, dashes and underscores", _matching(_JOB))

_SIZE = "workers and hosts"
_DISCOVERY = "host discovery"
_TIMES = "time limits, in seconds"
_CHANGES = "changes of the world"
_COMMITS = "commits"
_OUTPUT = "output"


def _option(default: object, group: str, kind: Kind, names: str, help: str) -> Any:
    return field(default=default, metadata={"names": Names(tuple(names.split()), kind, group, help)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a job. Times in seconds; None means off, or: not given."""

    command: tuple[str, ...]
    """What each worker runs."""

    np: int = _option(0, _SIZE, _COUNT, "-np --num-proc", "workers to start with")
    min_np: int = _option(0, _SIZE, _COUNT, "--min-np", "go on with as few as these (default: -np)")
    max_np: int | None = _option(
        None, _SIZE, _COUNT, "--max-np", "grow up to these (default: -np; with a discovery script: no limit)"
    )
    hosts: tuple[str, ...] = _option(
        (), _SIZE, _HOSTS, "-H --hosts", "where to run (default: localhost with -np slots)"
    )
    hostfile: str | None = _option(
        None, _SIZE, _PATH, "--hostfile", "a file with a host or host:slots on each line; may change while the job runs"
    )
    slots_per_host: int | None = _option(
        1,
        _SIZE,
        _SLOTS,
        "--slots-per-host",
        "for hosts that are named without slots; auto: a host's GPUs, or its cores if there are none",
    )
    backend: str = _option("auto", _SIZE, _BACKEND, "--backend", "how tensors travel between workers")
    host_discovery_script: str | None = _option(
        None, _DISCOVERY, _PATH, "--host-discovery-script", "a program that prints a host or host:slots on each line"
    )
    discovery_interval_s: float = _option(
        1.0, _DISCOVERY, _at_least_s(0.05), "--discovery-interval", "time between two looks at script or hostfile"
    )
    discovery_timeout_s: float = _option(
        10.0, _DISCOVERY, _at_least_s(0.1), "--discovery-timeout", "a script that runs longer is killed"
    )
    start_timeout_s: float = _option(
        600.0, _TIMES, _SECONDS, "--start-timeout", "fewer than --min-np workers ready after so long: give up"
    )
    elastic_timeout_s: float = _option(
        600.0, _TIMES, _SECONDS, "--elastic-timeout", "fewer than --min-np later on, for so long: give up"
    )
    regroup_timeout_s: float = _option(
        60.0, _TIMES, _SECONDS, "--regroup-timeout", "a survivor that takes longer to regroup joins later"
    )
    failure_grace_s: float = _option(
        2.0,
        _TIMES,
        _SECONDS,
        "--failure-grace",
        "all others alive for so long after an exception: it is the worker's own, not the world's",
    )
    drain_timeout_s: float = _option(
        30.0, _TIMES, _SECONDS, "--drain-timeout", "a leaver not let go after so long counts as a failure"
    )
    heartbeat_timeout_s: float = _option(
        10.0, _TIMES, _at_least_s(0.5), "--heartbeat-timeout", "a worker or agent silent for so long is killed"
    )
    hold_timeout_s: float = _option(
        2.0, _TIMES, _SECONDS, "--hold-timeout", "a planned change not agreed on after so long is put off"
    )
    driver_timeout_s: float = _option(
        10.0,
        _TIMES,
        _SECONDS,
        "--driver-timeout --orphan-timeout",
        "an agent without elasticrun for so long stops its workers",
    )
    hang_timeout_s: float | None = _option(
        None, _TIMES, _SECONDS_OR_OFF, "--hang-timeout", "a worker without a tick for so long is killed"
    )
    collective_timeout_s: float = _option(
        1800.0, _TIMES, _at_least_s(1.0), "--collective-timeout", "time-out of all process groups"
    )
    gate_timeout_s: float | None = _option(
        None, _TIMES, _SECONDS_OR_OFF, "--gate-timeout", "members not done so long after the first one: a failure"
    )
    stop_timeout_s: float = _option(10.0, _TIMES, _SECONDS, "--stop-timeout", "from asking a worker to stop to SIGKILL")
    join_window_s: float = _option(
        5.0, _CHANGES, _SECONDS, "--join-window", "a ready newcomer waits so long for others that are still starting"
    )
    min_interrupt_distance_s: float = _option(
        5.0, _CHANGES, _SECONDS, "--min-interrupt-distance", "between two planned changes of the world, at least"
    )
    reset_limit: int | None = _option(
        None, _CHANGES, _LIMIT_OR_OFF, "--reset-limit", "more failures than these end the job"
    )
    max_no_progress: int = _option(
        3, _CHANGES, _COUNT, "--max-no-progress", "failures in a row without a new commit that end the job"
    )
    cooldown_range_s: tuple[float, float] = _option(
        (10.0, 600.0), _CHANGES, _RANGE, "--cooldown-range", "a host that fails again and again is left alone so long"
    )
    commit_dir: str = _option(
        "/dev/shm",
        _COMMITS,
        _PATH,
        "--commit-dir",
        "where commits are kept, two for each worker; any directory, best in memory",
    )
    verify_sync: bool = _option(
        False, _COMMITS, FLAG, "--verify-sync", "compare the states of all workers whenever some have been synced"
    )
    log_dir: str | None = _option(
        None, _OUTPUT, _PATH, "--log-dir", "keep each worker's output in <host>-<slot>.out and .err here, appended"
    )
    tag_output: bool = _option(True, _OUTPUT, FLAG, "--tag-output", "put [host:slot] before each line")
    events_file: str | None = _option(None, _OUTPUT, _PATH, "--events-file", "append each event here, as a JSON line")
    job_name: str | None = _option(
        None, _OUTPUT, _NAME, "--job-name", "the JOB of elasticrun status (default: made up)"
    )
    verbose: bool = _option(False, _OUTPUT, FLAG, "--verbose", "say why things are done, too")

    def policy(self) -> Policy:
        """What the core decides by."""
        names = {f.name for f in fields(Policy)}
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}
        low, high = self.cooldown_range_s
        return Policy(**same, cooldown_min_s=low, cooldown_max_s=high)


def option_names() -> dict[str, Names]:
    """Field name -> names of all options."""
    return {f.name: f.metadata["names"] for f in fields(Options) if "names" in f.metadata}


def read_options(
    given: Mapping[str, str | None], command: Sequence[str], environ: Mapping[str, str] | None = None
) -> Options:
    """Make the options from texts (field name -> text); what is not given comes from the environment twins.

    Raises OptionError (one line) on anything that cannot be used.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, option in option_names().items():
        source, text = "/".join(option.names), given.get(name)
        if text is None:
            source = next((twin for twin in option.twins if environ.get(twin)), "")
            text = environ.get(source)
        if text is not None:
            try:
                values[name] = option.kind.parse(text)
            except ValueError:
                raise OptionError(f"{source}: {text!r}: takes {option.kind.takes}") from None
    return _complete(values, list(command))


def _complete(values: dict[str, Any], command: list[str]) -> Options:
    """Fill in the defaults that hang on other options, and refuse what contradicts itself."""
    if not command:
        raise OptionError("COMMAND is missing: what each worker runs, for example: elasticrun -np 2 python train.py")
    if command[0].endswith(".py"):
        command = [sys.executable, "-u", *command]
    if "np" not in values:
        raise OptionError("-np/--num-proc is missing: takes the number of workers to start with")
    places = [name for name in ("hosts", "hostfile", "host_discovery_script") if name in values]
    if len(places) > 1:
        both = " and ".join("--" + name.replace("_", "-") for name in places)
        raise OptionError(f"{both} are given: takes one of them")
    np = values["np"]
    values.setdefault("min_np", np)
    values.setdefault("max_np", None if "host_discovery_script" in values else np)
    if values["min_np"] > np:
        raise OptionError(f"--min-np: {values['min_np']}: takes a number up to -np, which is {np}")
    if values["max_np"] is not None and values["max_np"] < np:
        raise OptionError(f"--max-np: {values['max_np']}: takes a number from -np on, which is {np}")
    return Options(command=tuple(command), **values)


def version() -> str:
    """The version of the installed package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("elasticstate")
    except PackageNotFoundError:
        return "0+source"


# ------------------------------------------------------------------------------------------------ the environment


def socket_variable(path: str) -> tuple[str, str]:
    """The environment variable, and its value, that all workers of one agent have."""
    return PREFIX + "SOCKET", path


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What an agent tells the worker that it starts."""

    socket: str  # path of the agent's Unix socket
    worker: WorkerId
    job: str
    job_id: str  # unlike that of any other job
    local_address: str  # at which other hosts reach this one
    commits: str  # what the names of the files of its slot begin with: its page, its two buffers
    reserve_bytes: int = 0  # what a commit of the job takes, as far as is known

    def variables(self) -> dict[str, str]:
        """As environment variables; :func:`worker_environment` reads them."""
        host, slot, incarnation = self.worker
        return {
            **dict([socket_variable(self.socket)]),
            PREFIX + "WORKER": f"{host}:{slot}:{incarnation}",
            PREFIX + "JOB": self.job,
            PREFIX + "JOB_ID": self.job_id,
            PREFIX + "LOCAL_ADDRESS": self.local_address,
            PREFIX + "COMMITS": self.commits,
            PREFIX + "RESERVE_BYTES": str(self.reserve_bytes),
        }


def worker_environment() -> WorkerEnvironment | None:
    """What the agent has told this process; None when it was not started by one. Raises OptionError on rubbish."""
    socket = os.environ.get(PREFIX + "SOCKET")
    if not socket:
        return None
    try:
        host, slot, incarnation = os.environ[PREFIX + "WORKER"].rsplit(":", 2)
        worker = WorkerId(host, int(slot), int(incarnation))
        names = ("JOB", "JOB_ID", "LOCAL_ADDRESS", "COMMITS")
        told = {name.lower(): os.environ[PREFIX + name] for name in names}
        return WorkerEnvironment(
            socket=socket, worker=worker, **told, reserve_bytes=int(os.environ.get(PREFIX + "RESERVE_BYTES", 0))
        )
    except (KeyError, ValueError):
        raise OptionError(f"{PREFIX}SOCKET is set, but the other variables of a worker are not") from None


def inherited_environment() -> dict[str, str]:
    """The environment of this process, for the processes that it starts; without what :func:`quiet_grpc` has set."""
    return {name: value for name, value in os.environ.items() if (name, value) != _QUIET_GRPC}


_QUIET_GRPC = ("GRPC_VERBOSITY", "NONE")


def quiet_grpc() -> None:
    """Keep gRPC's own log off the terminal, unless the user asks for it. Before gRPC is imported."""
    os.environ.setdefault(*_QUIET_GRPC)


def runtime_directory() -> Path:
    """Where a running job keeps its record: XDG_RUNTIME_DIR, or the directory for temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def foreign_world_size() -> int:
    """The world size that another launcher (torchrun, mpirun with wrappers) has set; 1 if none has."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1
