"""The options of a job: one declaration each, in one frozen dataclass.

Parser, help, environment variables, ``launch()``, the reference and the core's policy are derived from the fields.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, cast

from elasticstate.core.policy import HOLD_TIMEOUT_S, Policy
from elasticstate.options import kinds

PREFIX = "ELASTICSTATE_"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One option: its names, the kind of its values, its default, its group in the help, and its help."""

    names: tuple[str, ...]
    kind: kinds.Kind
    default: object
    group: str
    help: str
    is_rare: bool  # only ``--help-all`` lists it

    @property
    def twins(self) -> tuple[str, ...]:
        """The environment variables of the option: one for each long name."""
        return tuple(PREFIX + name[2:].replace("-", "_").upper() for name in self.names if name.startswith("--"))

    @property
    def shown_default(self) -> str:
        """The default as a user types it; "" if the help describes it, or if there is none."""
        if "(default: " in self.help:
            return ""
        if self.default is None:
            return "off" if "off" in self.kind.valid else ""
        if isinstance(self.default, tuple):
            return " ".join(part.name if isinstance(part, Enum) else f"{part:g}" for part in self.default)
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _option(default: object, kind: kinds.Kind, help: str, names: str = "", rare: bool = False) -> Any:
    """Return the dataclass field of an option.

    ``names``: separated by spaces; without, the name of the field: ``--stop-timeout`` for ``stop_timeout_s``.
    """
    return field(default=default, metadata={"kind": kind, "help": help, "names": names.split(), "is_rare": rare})


_GROUPS = {  # by what a user wants to do: the first field of each group
    "np": "how many workers",
    "hosts": "which hosts",
    "backend": "how workers run",
    "start_timeout_s": "failures, and time limits in seconds",
    "drain_timeout_s": "planned changes, preemption and stragglers",
    "commit_dir": "commits, and copies of them",
    "log_dir": "what is shown",
    "stall_check_s": "jobs with elasticstate.horovod",
}

CONNECT_TIMEOUT_S = 10.0  # of commands that do not know the job's options
_LONGEST_GRACE_S = 2.0
_LONGEST_HEALTH_CHECK_S = 60.0  # an import of torch from a slow file system, and a matrix product
_SHORTEST_DISCOVERY_S = 10.0
_FEWEST_WITHOUT_PROGRESS = 3
_WEEK_S = 7 * 86400.0  # an endless limit would not fit into the clocks of torch
_WITH_DEBUGGER: Mapping[str, float | None] = {
    "start_timeout_s": _WEEK_S,
    "elastic_timeout_s": _WEEK_S,
    "regroup_timeout_s": _WEEK_S,
    "collective_timeout_s": _WEEK_S,
    "hang_timeout_s": None,
    "stall_check_s": None,
    "stall_shutdown_s": None,
}
"""Time limits of a job with a worker that a person may stop in a debugger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a job. Times are in seconds. None means: off, or not given."""

    command: tuple[str, ...]
    """The command that each worker runs."""
    call_directory: str | None = None
    """For ``launch()``: the directory with the function to call, which also gets the results."""
    reason_of_np: str = ""
    """No option. Why there are ``np`` workers, if ``-np`` was not given."""
    preemption_interval_s: float = 5.0
    """No option. Seconds between two runs of the preemption command: no cloud gives a notice of less than 30 s."""
    preemption_timeout_s: float = 5.0
    """No option. Seconds the preemption command may run: a metadata server answers in milliseconds."""
    timeline_filename: str | None = None
    """No option, but Horovod's HOROVOD_TIMELINE: file for a trace of the collectives, which rank 0 writes."""
    timeline_mark_cycles: bool = False
    """No option, but Horovod's HOROVOD_TIMELINE_MARK_CYCLES, which marks the ends of ticks in the timeline."""
    is_interactive: bool = False
    """No option. The worker of ``debug_rank`` shows its output as it is: somebody may type commands of a debugger."""
    np: int = _option(
        0,
        kinds.COUNT,
        "Number of workers to start with (default: one for each slot of -H or of Slurm's allocation; without hosts, "
        "one for each GPU of this machine, or each CPU core if it has no GPU).",
        names="-np --num-proc",
    )
    min_np: int = _option(
        0,
        kinds.COUNT,
        "Smallest number of workers to train with. With fewer, the job waits for --elastic-timeout and then fails "
        "(default: -np; in an allocation of Slurm without -np: 1).",
        names="--min-np --min-num-proc",
    )
    max_np: int | None = _option(
        None,
        kinds.COUNT,
        "Largest number of workers. Further slots stay empty (default: -np; with --host-discovery-script, --listen or "
        "Slurm: no limit).",
        names="--max-np --max-num-proc",
    )
    np_multiple: int = _option(
        1,
        kinds.COUNT,
        "Worlds have a multiple of this number of workers, for scripts with groups of fixed size. Workers beyond that "
        "wait as spares. Groups are on one host where possible.",
        rare=True,
    )
    spares: int = _option(0, kinds.NUMBER, "Number of booted workers that wait outside the world to replace lost ones.")
    hosts: tuple[str, ...] = _option(
        (), kinds.HOSTS, "Hosts and their numbers of slots (default: localhost with -np slots).", names="-H --hosts"
    )
    hostfile: str | None = _option(
        None,
        kinds.PATH,
        "File with one host or host:slots per line, perhaps followed by rack=NAME. It may change while the job runs.",
    )
    slots_per_host: int | None = _option(
        None,
        kinds.SLOTS,
        "Slots of a host that is named without slots. auto: one for each GPU of this machine, or each CPU core if it "
        "has no GPU (default: 1; slurm: its GPUs, or else its tasks).",
    )
    host_discovery_script: str | None = _option(
        None,
        kinds.PATH,
        "Program or shell command that prints one host or host:slots per line. It runs again and again.",
    )
    discovery: str | None = _option(
        None,
        kinds.NAME,
        "Host source: list, hostfile, script, dial-in, slurm, ray, kubernetes, or one of an installed package "
        "(default: by the other options; in an allocation of Slurm: slurm).",
    )
    discovery_interval_s: float | None = _option(
        None, kinds.at_least_s(0.05), "Seconds between two calls of host discovery (default: 1; slurm: 10).", rare=True
    )
    listen: str | None = _option(
        None,
        kinds.ADDRESS,
        "Address and port for agents that dial in (elasticrun agent --join ADDR:PORT). Their hosts are the hosts of "
        "the job, without ssh and without discovery.",
    )
    token_file: str | None = _option(
        None,
        kinds.PATH,
        "File with the token by which agents that dial in authenticate. elasticrun creates a missing file.",
    )
    pod_selector: str | None = _option(
        None,
        kinds.SELECTOR,
        "Label selector of the agents' pods in this namespace of Kubernetes, with --listen. The host of a pod that is "
        "being deleted is drained.",
        rare=True,
    )
    launcher: str | None = _option(
        None,
        kinds.NAME,
        "Program that starts an agent on each host: local, ssh, slurm, ray, or one of an installed package (default: "
        "local on this machine and ssh elsewhere; with --discovery slurm or ray: the same).",
        rare=True,
    )
    ssh_port: int | None = _option(
        None,
        kinds.PORT,
        "Port of the ssh servers (default: from ssh's configuration).",
        names="--ssh-port -p",
        rare=True,
    )
    ssh_identity_file: str | None = _option(
        None,
        kinds.PATH,
        "File with the private key for ssh (default: from ssh's configuration).",
        names="--ssh-identity-file -i",
        rare=True,
    )
    env: tuple[str, ...] = _option(
        (),
        kinds.NAMES,
        "Environment variables to pass to workers on other hosts, for example HF_TOKEN,NCCL_*. They never appear on a "
        "command line.",
    )
    network_interface: tuple[str, ...] = _option(
        (),
        kinds.INTERFACES,
        "Network interfaces for the connections between hosts, separated by commas: each host uses the first one that "
        "it has with an address and a link (default: that of the route to the driver).",
        names="--network-interface --network-interfaces",
        rare=True,
    )
    backend: str = _option(
        "auto",
        kinds.BACKEND,
        "Transport of tensors between workers. auto: nccl (with gloo for CPU tensors) if torch sees GPUs, else gloo. "
        "nccl2 is torch's new NCCL backend, experimental.",
    )
    bind: str = _option(
        "none",
        kinds.BIND,
        "Cores of each worker: all of its host (none), those of the NUMA node of its GPU, or without GPUs of one node "
        "(numa), or a share of that node, or without GPUs of all cores (cores).",
        rare=True,
    )
    horovod: bool = _option(False, kinds.FLAG, "Give the options their meanings in horovodrun (see the guide).")
    preload: tuple[str, ...] | None = _option(
        (),
        kinds.MODULES_OR_OFF,
        "Modules that a process on each host imports besides torch, so that workers that fork from it boot at once. "
        "off: no such process; each worker imports for itself.",
        rare=True,
    )
    start_timeout_s: float = _option(
        600.0,
        kinds.SECONDS,
        "Seconds until --min-np workers must be ready for the first time. After that the job fails.",
    )
    elastic_timeout_s: float = _option(
        600.0, kinds.SECONDS, "Seconds the job may have fewer than --min-np workers later on. After that the job fails."
    )
    regroup_timeout_s: float = _option(
        60.0,
        kinds.SECONDS,
        "Seconds survivors may take to regroup. After that the world forms without the late ones, which join later.",
        rare=True,
    )
    heartbeat_timeout_s: float = _option(
        10.0,
        kinds.at_least_s(0.5),
        "Seconds without a heartbeat. After that a worker is killed, and an agent and its host count as lost.",
    )
    hang_timeout_s: float | None = _option(
        None,
        kinds.SECONDS_OR_OFF,
        "Seconds a worker may go without a tick or a call of state.progress(). After that its generation ends, and a "
        "worker that still does not move is killed.",
    )
    collective_timeout_s: float = _option(
        1800.0,
        kinds.at_least_s(1.0),
        "Seconds a collective may take. After that it raises an error; one of NCCL ends the generation.",
        rare=True,
    )
    lease_s: float | None = _option(
        None,
        kinds.LEASE,
        "For jobs whose ticks have no collective of all workers (HSDP): seconds after which an unreachable host "
        "stops training. The others continue 1.25 times as long after they have counted it as lost.",
        rare=True,
    )
    driver_timeout_s: float = _option(
        300.0,
        kinds.SECONDS,
        "Seconds an agent waits for a lost elasticrun. After that the agent stops its workers.",
        names="--driver-timeout --orphan-timeout",
        rare=True,
    )
    standbys: int | None = _option(
        None,
        kinds.LIMIT_OR_OFF,
        "Survive the loss of this machine: three machines (five, with 50 hosts) keep the record of the job, and "
        "a majority of them must live. N of them run a standby, which continues the job when elasticrun has been lost "
        "for --heartbeat-timeout. 0: only elasticrun --reattach JOB --listen continues it.",
        names="--standbys",
    )
    stop_timeout_s: float = _option(
        10.0,
        kinds.SECONDS,
        "Seconds a worker may take to exit when it is stopped. After that it is killed with SIGKILL.",
        rare=True,
    )
    reset_limit: int | None = _option(
        None, kinds.LIMIT_OR_OFF, "Number of failures that the job may survive. One failure more ends the job."
    )
    cooldown_range_s: tuple[float, float] = _option(
        (10.0, 600.0),
        kinds.RANGE,
        "Shortest and longest cooldown in seconds: a failed host stays unused for it, each time twice as long. A "
        "preempted host has the longest one.",
        names="--cooldown-range --blacklist-cooldown-range",
    )
    health_check: str | None = _option(
        None,
        kinds.COMMAND,
        "Command that each host runs before its first workers start and after a failure there, with the host's name in "
        "ELASTICSTATE_HOST. Another exit code than 0: the host gets a cooldown, and is checked again.",
        rare=True,
    )
    drain_timeout_s: float = _option(
        30.0, kinds.SECONDS, "Seconds a drain may take. After that the worker counts as failed."
    )
    preemption_command: str | None = _option(
        None,
        kinds.COMMAND,
        "Command that each host runs to look for a preemption notice, with the host's name in ELASTICSTATE_HOST. Exit "
        "code 0: the host is drained; 1: no notice.",
    )
    preemption_signals: tuple[int, ...] = _option(
        (signal.SIGTERM,),
        kinds.SIGNALS,
        "Signals that count as a preemption notice. An agent that receives one drains its host, a worker itself.",
        rare=True,
    )
    join_window_s: float = _option(
        5.0,
        kinds.SECONDS,
        "Seconds a ready newcomer waits for others that are still starting. After that it joins without them.",
        rare=True,
    )
    min_interrupt_distance_s: float = _option(
        5.0,
        kinds.SECONDS,
        "Least number of seconds between two planned changes of the world. Drains do not wait for it.",
        rare=True,
    )
    straggler_action: str = _option(
        "warn",
        kinds.STRAGGLER_ACTION,
        "Action after the warning about a straggler: none (warn), or a drain of its worker (drain), one at a time. A "
        "drained slot stays empty for the longest cooldown.",
        rare=True,
    )
    divergence: str = _option(
        "warn",
        kinds.DIVERGENCE,
        "Comparison of parameters, buffers and optimizers in the commits of all ranks: none (off), a warning with "
        "the ranks that differ and the first value (warn), or also a restart from the newest commit that is equal on "
        "all ranks, without the workers that differ from most others (restore).",
        rare=True,
    )
    commit_dir: str = _option(
        "/dev/shm",
        kinds.PATH,
        "Directory of the commit storage, best in memory: two commits for each worker. A commit that does not fit is "
        "refused.",
    )
    one_copy_per_host: bool = _option(
        False,
        kinds.FLAG,
        "Keep commits of one worker of each host, from which the others there restore. All workers' values must be "
        "equal: they are compared at the first commit of each world.",
    )
    replicas: int | None = _option(
        None,
        kinds.NUMBER,
        "Number of other hosts that keep a copy of each shard of a sharded state (default: 1 if a shard is on one "
        "host of several, else 0).",
    )
    replica_rate: int | None = _option(
        None,
        kinds.BYTES_OR_OFF,
        "Most bytes per second that a host sends to other hosts for --replicas, for example 100M. off: no limit.",
        rare=True,
    )
    durable_dir: str | None = _option(
        None,
        kinds.PATH,
        "Directory, or URL of fsspec (s3://bucket/run), for durable copies of commits. A job that finds complete "
        "copies there resumes from the newest one.",
    )
    durable_interval_s: float = _option(600.0, kinds.SECONDS, "Seconds between the begins of two durable copies.")
    durable_keep: int = _option(3, kinds.COUNT, "Number of durable copies to keep. Older ones are removed.")
    durable_timeout_s: float = _option(
        60.0,
        kinds.at_least_s(1.0),
        "Seconds a durable copy may be written or read without progress. After that the attempt has failed.",
        rare=True,
    )
    commit_device_memory: int = _option(
        0,
        kinds.BYTES,
        "Bytes of each worker's GPU memory that a commit may use. More memory means that training waits less.",
        rare=True,
    )
    verify_sync: bool = _option(
        False, kinds.FLAG, "Compare all states after each sync. A difference is an error.", rare=True
    )
    tick_records: bool = _option(
        False,
        kinds.FLAG,
        "Record each tick, so that a failure repeats none if possible. Only on CPUs; replaces methods of torch.Tensor.",
        rare=True,
    )
    log_dir: str | None = _option(
        None,
        kinds.PATH,
        "Directory for each worker's output, in <host>-<slot>.out and .err. Files are appended to, never deleted.",
    )
    only_ranks: tuple[tuple[int, int], ...] = _option(
        (),
        kinds.RANKS,
        "Ranks whose output is shown on the terminal, for example 0,4-7 (default: all). Files have the output of all "
        "ranks.",
    )
    tee: int = _option(
        3,
        kinds.STREAMS,
        "Streams shown on the terminal besides the files of --log-dir: 0 none, 1 stdout, 2 stderr, 3 both.",
        rare=True,
    )
    debug_rank: int | None = _option(
        None,
        kinds.NUMBER,
        "Rank, in the first world, of the worker that reads the terminal, for breakpoint() and input(). Its slot keeps "
        "the terminal when ranks change. Its output is shown as it is. Time limits are a week or off (default: 0 with "
        "a single worker).",
    )
    verbose: bool = _option(False, kinds.FLAG, "Print the reasons for decisions, too.")
    job_name: str | None = _option(
        None, kinds.NAME, "Name for elasticrun status and --reattach (default: a generated one)."
    )
    events_file: str | None = _option(None, kinds.PATH, "File to which each event is appended as a line of JSON.")
    metrics: str | None = _option(
        None,
        kinds.PAGE,
        "Port, on the loopback interface or ADDR, at which Prometheus reads metrics: http://127.0.0.1:PORT/metrics.",
    )
    dashboard: str | None = _option(
        None,
        kinds.PAGE,
        "Port, on the loopback interface or ADDR, of a web page that shows the job: http://127.0.0.1:PORT/.",
    )
    dashboard_require_token: bool = _option(
        False,
        kinds.FLAG,
        "Show the job only to requests with its token, also over the loopback interface: for a proxy in front of the "
        "--dashboard.",
        rare=True,
    )
    stall_check_s: float | None = _option(
        60.0,
        kinds.SECONDS_OR_NEVER,
        "Seconds some ranks may wait in a collective for ranks that have not made the call. After that a warning "
        "names the call, the waiting and the missing ranks.",
        names="--stall-check-time --stall-check-warning-time-seconds",
        rare=True,
    )
    stall_shutdown_s: float | None = _option(
        None,
        kinds.SECONDS_OR_NEVER,
        "Seconds such a wait may last. After that the job fails.",
        names="--stall-shutdown-time --stall-check-shutdown-time-seconds",
        rare=True,
    )

    # Times and limits that follow from options.

    @property
    def connect_timeout_s(self) -> float:
        """Seconds to connect to a host and to authenticate: a host that is silent for as long is lost anyway."""
        return self.heartbeat_timeout_s

    @property
    def failure_grace_s(self) -> float:
        """Seconds to look for the cause of a worker's exception: some heartbeats, in which another failure shows."""
        return min(_LONGEST_GRACE_S, self.heartbeat_timeout_s / 5)

    @property
    def discovery_timeout_s(self) -> float:
        """Seconds host discovery may take: those until the next call, but at least ten."""
        return max(_SHORTEST_DISCOVERY_S, self.discovery_interval_s or 0.0)

    @property
    def hold_timeout_s(self) -> float:
        """Seconds the workers may take to agree on a planned change. A drain begins with it."""
        return min(HOLD_TIMEOUT_S, self.drain_timeout_s)

    @property
    def preemption_cooldown_s(self) -> float:
        """Seconds before a preempted host is used again: discovery may name it until it is gone."""
        return self.cooldown_range_s[1]

    @property
    def health_check_timeout_s(self) -> float:
        """Seconds the health check may take: a job with too few well hosts has its reason before it ends."""
        return min(_LONGEST_HEALTH_CHECK_S, self.start_timeout_s / 2)

    @property
    def max_no_progress(self) -> int:
        """Number of failures in a row without a new commit that ends the job: those of ``--reset-limit``, if more."""
        return max(_FEWEST_WITHOUT_PROGRESS, (self.reset_limit or 0) + 1)

    @property
    def has_one_worker(self) -> bool:
        """True if there is never a second worker, except while one replaces the other."""
        return self.max_np == 1 and not self.spares

    def for_debugger(self, is_asked_for: bool) -> Options:
        """Return the options of a job that waits while a person looks at a worker.

        ``is_asked_for``: by ``--debug-rank``, so also limits that were given are off.
        """
        usual = declarations()
        limits = {
            name: v for name, v in _WITH_DEBUGGER.items() if is_asked_for or getattr(self, name) == usual[name].default
        }
        return replace(self, is_interactive=True, **cast("dict[str, Any]", limits))

    def policy(self) -> Policy:
        """Return the options that the core decides by."""
        policy = Policy(**{f.name: getattr(self, f.name) for f in fields(Policy) if hasattr(self, f.name)})
        if self.is_interactive and not self.has_one_worker:  # the others wait, and nobody needs to be told why
            return replace(policy, straggler_threshold=inf, waiting_notice_s=_WEEK_S)
        return policy

    def timeline_variables(self) -> dict[str, str]:
        """Return Horovod's environment variables from which workers read where to write their timeline."""
        if self.timeline_filename is None:
            return {}
        path = self.timeline_filename
        absolute = path if path == _DYNAMIC else str(Path(path).absolute())
        marks = str(int(self.timeline_mark_cycles))
        return {HOROVOD["timeline_filename"]: absolute, HOROVOD["timeline_mark_cycles"]: marks}


_DYNAMIC = "DYNAMIC"  # the script starts the timeline
HOROVOD: Mapping[str, str] = {
    "stall_check_s": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown_s": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "timeline_filename": "HOROVOD_TIMELINE",
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
}
"""Horovod's variables that set a field, besides the option's own ones."""


@cache
def declarations() -> Mapping[str, Declaration]:
    """Return the options in the order of the help, by the names of their fields."""
    found, group = {}, ""
    for f in fields(Options):
        if "kind" in f.metadata:
            group = _GROUPS.get(f.name, group)
            names = tuple(f.metadata["names"]) or ("--" + f.name.removesuffix("_s").replace("_", "-"),)
            rest = {name: f.metadata[name] for name in ("kind", "help", "is_rare")}
            found[f.name] = Declaration(names=names, default=f.default, group=group, **rest)
    return found
