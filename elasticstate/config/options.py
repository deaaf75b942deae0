"""The options: one frozen dataclass, from which parser (cli.py), help, environment twins and policy are derived."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from elasticstate import kinds
from elasticstate.core.policy import Policy
from elasticstate.errors import OptionError

PREFIX = "ELASTICSTATE_"


@dataclass(frozen=True, slots=True)
class Names:
    """How an option is called, where the help shows it, and its line there."""

    names: tuple[str, ...]
    kind: kinds.Kind
    group: str
    help: str

    @property
    def twins(self) -> tuple[str, ...]:
        """The environment variables that stand for it: one for each long name."""
        return tuple(PREFIX + name[2:].replace("-", "_").upper() for name in self.names if name.startswith("--"))


_SIZE = "workers and hosts"
_DISCOVERY = "host discovery"
_REMOTE = "other hosts"
_TIMES = "time limits, in seconds"
_CHANGES = "changes of the world"
_PREEMPTION = "notice before preemption"
_COMMITS = "commits"
_OUTPUT = "output"


def _option(default: object, group: str, kind: kinds.Kind, names: str, help: str) -> Any:
    return field(default=default, metadata={"names": Names(tuple(names.split()), kind, group, help)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a job. Times in seconds; None means off, or: not given."""

    command: tuple[str, ...]
    """What each worker runs."""
    call_directory: str | None = None
    """Of ``launch()``: where the function to call is, and where its results go."""

    np: int = _option(0, _SIZE, kinds.COUNT, "-np --num-proc", "workers to start with")
    min_np: int = _option(0, _SIZE, kinds.COUNT, "--min-np --min-num-proc", "go on with as few as these (default: -np)")
    max_np: int | None = _option(
        None,
        _SIZE,
        kinds.COUNT,
        "--max-np --max-num-proc",
        "grow up to these (default: -np; with a discovery script: no limit)",
    )
    hosts: tuple[str, ...] = _option(
        (), _SIZE, kinds.HOSTS, "-H --hosts", "where to run (default: localhost with -np slots)"
    )
    hostfile: str | None = _option(
        None,
        _SIZE,
        kinds.PATH,
        "--hostfile",
        "a file with a host or host:slots on each line; may change while the job runs",
    )
    slots_per_host: int | None = _option(
        1,
        _SIZE,
        kinds.SLOTS,
        "--slots-per-host",
        "for hosts that are named without slots; auto: a host's GPUs, or its cores if there are none",
    )
    backend: str = _option("auto", _SIZE, kinds.BACKEND, "--backend", "how tensors travel between workers")
    host_discovery_script: str | None = _option(
        None,
        _DISCOVERY,
        kinds.PATH,
        "--host-discovery-script",
        "a program that prints a host or host:slots on each line",
    )
    discovery_interval_s: float = _option(
        1.0, _DISCOVERY, kinds.at_least_s(0.05), "--discovery-interval", "time between two looks at script or hostfile"
    )
    discovery_timeout_s: float = _option(
        10.0, _DISCOVERY, kinds.at_least_s(0.1), "--discovery-timeout", "a script that runs longer is killed"
    )
    ssh_port: int | None = _option(
        None, _REMOTE, kinds.PORT, "--ssh-port -p", "of the ssh servers (default: as ssh's own)"
    )
    ssh_identity_file: str | None = _option(
        None, _REMOTE, kinds.PATH, "--ssh-identity-file -i", "the key to log in with (default: as ssh's own)"
    )
    ssh_check_host_keys: bool = _option(
        True, _REMOTE, kinds.FLAG, "--ssh-check-host-keys", "refuse hosts whose key is not known"
    )
    remote_python: str | None = _option(
        None,
        _REMOTE,
        kinds.PATH,
        "--remote-python",
        "the Python of the agents on other hosts (default: this one's path)",
    )
    listen: str | None = _option(
        None,
        _REMOTE,
        kinds.ADDRESS,
        "--listen",
        "no ssh, no discovery: the hosts are those that run elasticrun agent --join ADDR:PORT",
    )
    token_file: str | None = _option(
        None,
        _REMOTE,
        kinds.PATH,
        "--token-file",
        "what agents prove with that they belong to the job; made if not there",
    )
    env: tuple[str, ...] = _option(
        (),
        _REMOTE,
        kinds.NAMES,
        "--env",
        "variables to pass on to other hosts, as HF_TOKEN,NCCL_*; never on a command line",
    )
    start_timeout_s: float = _option(
        600.0, _TIMES, kinds.SECONDS, "--start-timeout", "fewer than --min-np workers ready after so long: give up"
    )
    elastic_timeout_s: float = _option(
        600.0, _TIMES, kinds.SECONDS, "--elastic-timeout", "fewer than --min-np later on, for so long: give up"
    )
    regroup_timeout_s: float = _option(
        60.0, _TIMES, kinds.SECONDS, "--regroup-timeout", "a survivor that takes longer to regroup joins later"
    )
    failure_grace_s: float = _option(
        2.0,
        _TIMES,
        kinds.SECONDS,
        "--failure-grace",
        "all others alive for so long after an exception: it is the worker's own, not the world's",
    )
    drain_timeout_s: float = _option(
        30.0, _TIMES, kinds.SECONDS, "--drain-timeout", "a leaver not let go after so long counts as a failure"
    )
    heartbeat_timeout_s: float = _option(
        10.0, _TIMES, kinds.at_least_s(0.5), "--heartbeat-timeout", "a worker or agent silent for so long is killed"
    )
    hold_timeout_s: float = _option(
        2.0, _TIMES, kinds.SECONDS, "--hold-timeout", "a planned change not agreed on after so long is put off"
    )
    driver_timeout_s: float = _option(
        300.0,
        _TIMES,
        kinds.SECONDS,
        "--driver-timeout --orphan-timeout",
        "an agent without elasticrun for so long stops its workers",
    )
    reattach_timeout_s: float = _option(
        60.0, _TIMES, kinds.SECONDS, "--reattach-timeout", "a restarted elasticrun waits so long for its agents"
    )
    lease_s: float | None = _option(
        None,
        _TIMES,
        kinds.LEASE,
        "--lease",
        "for ticks without a collective of all workers (local SGD): a host out of touch for so long stands still",
    )
    connect_timeout_s: float = _option(
        10.0,
        _TIMES,
        kinds.at_least_s(0.1),
        "--connect-timeout",
        "a host that does not answer or prove itself for so long",
    )
    hang_timeout_s: float | None = _option(
        None, _TIMES, kinds.SECONDS_OR_OFF, "--hang-timeout", "a worker without a tick for so long is killed"
    )
    collective_timeout_s: float = _option(
        1800.0, _TIMES, kinds.at_least_s(1.0), "--collective-timeout", "time-out of all process groups"
    )
    gate_timeout_s: float | None = _option(
        None, _TIMES, kinds.SECONDS_OR_OFF, "--gate-timeout", "members not done so long after the first one: a failure"
    )
    stop_timeout_s: float = _option(
        10.0, _TIMES, kinds.SECONDS, "--stop-timeout", "from asking a worker to stop to SIGKILL"
    )
    join_window_s: float = _option(
        5.0,
        _CHANGES,
        kinds.SECONDS,
        "--join-window",
        "a ready newcomer waits so long for others that are still starting",
    )
    min_interrupt_distance_s: float = _option(
        5.0, _CHANGES, kinds.SECONDS, "--min-interrupt-distance", "between two planned changes of the world, at least"
    )
    reset_limit: int | None = _option(
        None, _CHANGES, kinds.LIMIT_OR_OFF, "--reset-limit", "more failures than these end the job"
    )
    reset_window_s: float | None = _option(
        None,
        _CHANGES,
        kinds.SECONDS_OR_OFF,
        "--reset-window",
        "--reset-limit counts the failures of so long only, not those of the whole job",
    )
    max_no_progress: int = _option(
        3, _CHANGES, kinds.COUNT, "--max-no-progress", "failures in a row without a new commit that end the job"
    )
    cooldown_range_s: tuple[float, float] = _option(
        (10.0, 600.0),
        _CHANGES,
        kinds.RANGE,
        "--cooldown-range --blacklist-cooldown-range",
        "a host that fails again and again is left alone so long",
    )
    preemption_signals: tuple[int, ...] = _option(
        (signal.SIGTERM,), _PREEMPTION, kinds.SIGNALS, "--preemption-signals", "to an agent or a worker: it is to leave"
    )
    preemption_command: str | None = _option(
        None,
        _PREEMPTION,
        kinds.COMMAND,
        "--preemption-command",
        "asked on each host, its name in ELASTICSTATE_HOST; exits with 0 if it is to be left, with 1 if not",
    )
    preemption_interval_s: float = _option(
        5.0, _PREEMPTION, kinds.at_least_s(0.05), "--preemption-interval", "between two calls of the command"
    )
    preemption_timeout_s: float = _option(
        5.0, _PREEMPTION, kinds.at_least_s(0.1), "--preemption-timeout", "a command that runs longer is killed"
    )
    preemption_window_s: float = _option(
        1.0, _PREEMPTION, kinds.SECONDS, "--preemption-window", "so long a leaver waits for others to have notice, too"
    )
    preemption_rest_s: float = _option(
        600.0, _PREEMPTION, kinds.SECONDS, "--preemption-rest", "a host that had notice is left alone for so long"
    )
    commit_dir: str = _option(
        "/dev/shm",
        _COMMITS,
        kinds.PATH,
        "--commit-dir",
        "where commits are kept, two for each worker; any directory, best in memory",
    )
    commit_device_memory: int = _option(
        0,
        _COMMITS,
        kinds.BYTES,
        "--commit-device-memory",
        "so much memory of each worker's GPU a commit may take, so that training waits less for it",
    )
    verify_sync: bool = _option(
        False, _COMMITS, kinds.FLAG, "--verify-sync", "compare the states of all workers whenever some have been synced"
    )
    log_dir: str | None = _option(
        None,
        _OUTPUT,
        kinds.PATH,
        "--log-dir",
        "keep each worker's output in <host>-<slot>.out and .err here: appended, never deleted",
    )
    tee: int = _option(
        3,
        _OUTPUT,
        kinds.STREAMS,
        "--tee",
        "what the terminal gets of that, too: 0 nothing, 1 stdout, 2 stderr, 3 both",
    )
    only_ranks: tuple[tuple[int, int], ...] = _option(
        (), _OUTPUT, kinds.RANKS, "--only-ranks", "only their output goes to the terminal, as 0,4-7; files get all"
    )
    tag_output: bool = _option(True, _OUTPUT, kinds.FLAG, "--tag-output", "put [host:slot] before each line")
    events_file: str | None = _option(
        None, _OUTPUT, kinds.PATH, "--events-file", "append each event here, as a JSON line"
    )
    job_name: str | None = _option(
        None, _OUTPUT, kinds.NAME, "--job-name", "the JOB of elasticrun status (default: made up)"
    )
    verbose: bool = _option(False, _OUTPUT, kinds.FLAG, "--verbose", "say why things are done, too")

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
    values = _parse(given, environ)
    if not command:
        raise OptionError("COMMAND is missing: what each worker runs, for example: elasticrun -np 2 python train.py")
    if "np" not in values:
        raise OptionError("-np/--num-proc is missing: takes the number of workers to start with")
    return _complete(values, list(command))


def read_options_to_check(
    given: Mapping[str, str | None], environ: Mapping[str, str] | None = None
) -> tuple[Options, frozenset[str]]:
    """For ``--check``: the options, and which of them were given. There need be no job to run, so no COMMAND and no
    ``-np``.

    Raises OptionError.
    """
    values = _parse(given, environ)
    options = _complete({"np": max(1, values.get("min_np", 1)), **values}, ["true"])
    return options, frozenset(values)


def _parse(given: Mapping[str, str | None], environ: Mapping[str, str] | None) -> dict[str, Any]:
    """The values of what is given."""
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
    return values


def _complete(values: dict[str, Any], command: list[str]) -> Options:
    """Fill in the defaults that hang on other options, and refuse what contradicts itself."""
    if command[0].endswith(".py"):
        command = [sys.executable, "-u", *command]
    places = [name for name in ("hosts", "hostfile", "host_discovery_script") if name in values]
    if len(places) > 1:
        both = " and ".join("--" + name.replace("_", "-") for name in places)
        raise OptionError(f"{both} are given: takes one of them")
    if "listen" in values and places:
        raise OptionError(f"--listen and --{places[0].replace('_', '-')} are given: takes one of them")
    if ("listen" in values) != ("token_file" in values):
        raise OptionError("--listen and --token-file: takes both: agents that dial in prove with it who they are")
    if values.get("tee", 3) != 3 and "log_dir" not in values:
        raise OptionError(f"--tee: {values['tee']}: takes 3 without --log-dir: the rest would be lost")
    np = values["np"]
    values.setdefault("min_np", np)
    values.setdefault("max_np", None if {"host_discovery_script", "listen"} & set(values) else np)
    if values["min_np"] > np:
        raise OptionError(f"--min-np: {values['min_np']}: takes a number up to -np, which is {np}")
    if values["max_np"] is not None and values["max_np"] < np:
        raise OptionError(f"--max-np: {values['max_np']}: takes a number from -np on, which is {np}")
    return Options(command=tuple(command), **values)


# ------------------------------------------------------------------------------------------------ the environment
