"""The options: one frozen dataclass. Parser, help, environment twins and policy are derived from its fields."""

from __future__ import annotations

import signal
from dataclasses import dataclass, fields

from elasticstate import kinds
from elasticstate.config.commit_options import COMMITS, CommitOptions
from elasticstate.config.horovod_options import HorovodOptions
from elasticstate.config.host_options import DISCOVERY, REMOTE, HostOptions
from elasticstate.config.option import Names, option
from elasticstate.core.policy import HOLD_TIMEOUT_S, Policy

_SIZE = "workers and hosts"
CONNECT_TIMEOUT_S = 10.0  # of commands that do not know the job's options
_LONGEST_GRACE_S = 2.0
_SHORTEST_DISCOVERY_S = 10.0
_FEWEST_WITHOUT_PROGRESS = 3
_TIMES = "time limits, in seconds"
_CHANGES = "changes of the world"
_PREEMPTION = "preemption"
_OUTPUT = "output"
_GROUPS = (_SIZE, DISCOVERY, REMOTE, _TIMES, _CHANGES, _PREEMPTION, COMMITS, _OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(HostOptions, CommitOptions, HorovodOptions):
    """All options of a job. Times are in seconds. None means: off, or not given."""

    command: tuple[str, ...]
    """The command that each worker runs."""
    call_directory: str | None = None
    """For ``launch()``: the directory with the function to call, which also gets the results."""
    preemption_interval_s: float = 5.0
    """No option. Seconds between two runs of the preemption command: no cloud gives a notice of less than 30 s."""
    preemption_timeout_s: float = 5.0
    """No option. Seconds the preemption command may run: a metadata server answers in milliseconds."""

    np: int = option(
        0,
        _SIZE,
        kinds.COUNT,
        "-np --num-proc",
        "Number of workers to start with (inside an allocation of Slurm: its slots).",
    )
    min_np: int = option(
        0,
        _SIZE,
        kinds.COUNT,
        "--min-np --min-num-proc",
        "Smallest number of workers to train with (default: -np; in an allocation of Slurm without -np: 1). With "
        "fewer, the job waits for --elastic-timeout and then fails.",
    )
    max_np: int | None = option(
        None,
        _SIZE,
        kinds.COUNT,
        "--max-np --max-num-proc",
        "Largest number of workers (default: -np; with --host-discovery-script, --listen or Slurm: no limit). Further "
        "slots stay empty.",
    )
    horovod: bool = option(
        False, _SIZE, kinds.FLAG, "--horovod", "Give the options their meanings in horovodrun (see the guide)."
    )
    spares: int = option(
        0, _SIZE, kinds.NUMBER, "--spares", "Number of booted workers that wait outside the world to replace lost ones."
    )
    hosts: tuple[str, ...] = option(
        (), _SIZE, kinds.HOSTS, "-H --hosts", "Hosts and their numbers of slots (default: localhost with -np slots)."
    )
    hostfile: str | None = option(
        None,
        _SIZE,
        kinds.PATH,
        "--hostfile",
        "File with one host or host:slots per line, perhaps followed by rack=NAME. The file may change while the job "
        "runs.",
    )
    slots_per_host: int | None = option(
        None,
        _SIZE,
        kinds.SLOTS,
        "--slots-per-host",
        "Number of slots of a host that is named without slots. auto: one for each GPU of this machine, "
        "or for each CPU core if it has no GPU (default: 1; slurm: its GPUs, or else its tasks).",
    )
    backend: str = option(
        "auto",
        _SIZE,
        kinds.BACKEND,
        "--backend",
        "Transport of tensors between workers. auto: nccl (with gloo for CPU tensors) if torch sees GPUs, else gloo. "
        "nccl2: torch's new NCCL backend, experimental.",
    )
    preload: tuple[str, ...] | None = option(
        (),
        _SIZE,
        kinds.MODULES_OR_OFF,
        "--preload",
        "Modules that a process on each host imports besides torch, so that workers that fork from it boot at once. "
        "off: no such process; each worker imports for itself.",
    )
    start_timeout_s: float = option(
        600.0,
        _TIMES,
        kinds.SECONDS,
        "--start-timeout",
        "Seconds until --min-np workers must be ready for the first time. After that the job fails.",
    )
    elastic_timeout_s: float = option(
        600.0,
        _TIMES,
        kinds.SECONDS,
        "--elastic-timeout",
        "Seconds the job may have fewer than --min-np workers later on. After that the job fails.",
    )
    regroup_timeout_s: float = option(
        60.0,
        _TIMES,
        kinds.SECONDS,
        "--regroup-timeout",
        "Seconds survivors may take to regroup. After that the world forms without the late ones, which join later.",
    )
    drain_timeout_s: float = option(
        30.0,
        _TIMES,
        kinds.SECONDS,
        "--drain-timeout",
        "Seconds a drain may take. After that the worker counts as failed.",
    )
    heartbeat_timeout_s: float = option(
        10.0,
        _TIMES,
        kinds.at_least_s(0.5),
        "--heartbeat-timeout",
        "Seconds without a heartbeat. After that a worker is killed, and an agent and its host count as lost.",
    )
    driver_timeout_s: float = option(
        300.0,
        _TIMES,
        kinds.SECONDS,
        "--driver-timeout --orphan-timeout",
        "Seconds an agent waits for a lost elasticrun. After that the agent stops its workers.",
    )
    lease_s: float | None = option(
        None,
        _TIMES,
        kinds.LEASE,
        "--lease",
        "For jobs whose ticks have no collective of all workers (local SGD): seconds after which an unreachable host "
        "stops training. The others continue 1.25 times as long after they have counted it as lost.",
    )
    hang_timeout_s: float | None = option(
        None,
        _TIMES,
        kinds.SECONDS_OR_OFF,
        "--hang-timeout",
        "Seconds a worker may go without a tick or a call of state.progress(). After that its generation ends, and the "
        "worker that does not move for --failure-grace then is killed.",
    )
    collective_timeout_s: float = option(
        1800.0,
        _TIMES,
        kinds.at_least_s(1.0),
        "--collective-timeout",
        "Seconds a collective may take. After that it raises an error; one of NCCL ends the generation.",
    )
    stop_timeout_s: float = option(
        10.0,
        _TIMES,
        kinds.SECONDS,
        "--stop-timeout",
        "Seconds a worker may take to exit when it is stopped. After that it is killed with SIGKILL.",
    )
    join_window_s: float = option(
        5.0,
        _CHANGES,
        kinds.SECONDS,
        "--join-window",
        "Seconds a ready newcomer waits for others that are still starting. After that it joins without them.",
    )
    min_interrupt_distance_s: float = option(
        5.0,
        _CHANGES,
        kinds.SECONDS,
        "--min-interrupt-distance",
        "Least number of seconds between two planned changes of the world. Drains do not wait for it.",
    )
    reset_limit: int | None = option(
        None,
        _CHANGES,
        kinds.LIMIT_OR_OFF,
        "--reset-limit",
        "Number of failures that the job may survive. One failure more ends the job.",
    )
    cooldown_range_s: tuple[float, float] = option(
        (10.0, 600.0),
        _CHANGES,
        kinds.RANGE,
        "--cooldown-range --blacklist-cooldown-range",
        "Shortest and longest cooldown in seconds: a failed host stays unused for it. It doubles each time, and is up "
        "to a tenth longer.",
    )
    preemption_signals: tuple[int, ...] = option(
        (signal.SIGTERM,),
        _PREEMPTION,
        kinds.SIGNALS,
        "--preemption-signals",
        "Signals that count as a preemption notice. An agent that receives one drains its host, a worker itself.",
    )
    preemption_command: str | None = option(
        None,
        _PREEMPTION,
        kinds.COMMAND,
        "--preemption-command",
        "Command that each host runs to look for a preemption notice, with the host's name in ELASTICSTATE_HOST. Exit "
        "code 0: the host is drained; 1: no notice.",
    )
    straggler_action: str = option(
        "warn",
        _CHANGES,
        kinds.STRAGGLER_ACTION,
        "--straggler-action",
        "Action after the warning about a straggler: none (warn), or a drain of its worker (drain), one at a time. "
        "A drained slot stays empty for --preemption-cooldown.",
    )
    log_dir: str | None = option(
        None,
        _OUTPUT,
        kinds.PATH,
        "--log-dir",
        "Directory for each worker's output, in <host>-<slot>.out and .err. Files are appended to, never deleted.",
    )
    tee: int = option(
        3,
        _OUTPUT,
        kinds.STREAMS,
        "--tee",
        "Streams shown on the terminal besides the files of --log-dir: 0 none, 1 stdout, 2 stderr, 3 both.",
    )
    only_ranks: tuple[tuple[int, int], ...] = option(
        (),
        _OUTPUT,
        kinds.RANKS,
        "--only-ranks",
        "Ranks whose output is shown on the terminal, for example 0,4-7 (default: all). Files have the output of all "
        "ranks.",
    )
    events_file: str | None = option(
        None, _OUTPUT, kinds.PATH, "--events-file", "File to which each event is appended as a line of JSON."
    )
    metrics: str | None = option(
        None,
        _OUTPUT,
        kinds.PAGE,
        "--metrics",
        "Port, on the loopback interface or ADDR, at which Prometheus reads metrics: http://127.0.0.1:PORT/metrics.",
    )
    dashboard: str | None = option(
        None,
        _OUTPUT,
        kinds.PAGE,
        "--dashboard",
        "Port, on the loopback interface or ADDR, of a web page that shows the job: http://127.0.0.1:PORT/.",
    )
    dashboard_require_token: bool = option(
        False,
        _OUTPUT,
        kinds.FLAG,
        "--dashboard-require-token",
        "Show the job only to requests with its token, also over the loopback interface: for a proxy in front of the "
        "--dashboard.",
    )
    job_name: str | None = option(
        None, _OUTPUT, kinds.NAME, "--job-name", "Name for elasticrun status and --reattach (default: a generated one)."
    )
    verbose: bool = option(False, _OUTPUT, kinds.FLAG, "--verbose", "Print the reasons for decisions, too.")

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
    def gate_timeout_s(self) -> float:
        """Seconds without progress of others in which the exit gate fails: they hang as in a collective."""
        return self.collective_timeout_s

    @property
    def preemption_cooldown_s(self) -> float:
        """Seconds before a preempted host is used again: discovery may name it until it is gone."""
        return self.cooldown_range_s[1]

    @property
    def max_no_progress(self) -> int:
        """Number of failures in a row without a new commit that ends the job: those of ``--reset-limit``, if more."""
        return max(_FEWEST_WITHOUT_PROGRESS, (self.reset_limit or 0) + 1)

    def policy(self) -> Policy:
        """Return the options that the core decides by."""
        return Policy(**{f.name: getattr(self, f.name) for f in fields(Policy) if hasattr(self, f.name)})


def option_names() -> dict[str, Names]:
    """Field name -> names of all options, in the order of their groups in the help."""
    names = {f.name: f.metadata["names"] for f in fields(Options) if "names" in f.metadata}
    last = len(_GROUPS)  # the options for elasticstate.horovod
    order = {name: _GROUPS.index(one.group) if one.group in _GROUPS else last for name, one in names.items()}
    return {name: names[name] for name in sorted(names, key=lambda name: order[name])}
