"""The values of options that the core's decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass

HOLD_TIMEOUT_S = 2.0  # for the workers' answers to a hold; after that training goes on, and the hold is repeated later
LEASE_MARGIN = 1.25  # the others wait this many times as long as an unreachable host may train on: clocks differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Values of the options that the core reads. Times are in seconds; None means no limit.

    ``Options.policy()`` fills in these fields by name. Names, defaults and help of the options are in
    options/options.py only.
    """

    np: int
    min_np: int
    max_np: int | None
    horovod: bool  # the options have their meanings in horovodrun
    np_multiple: int  # sizes of worlds are multiples of this number
    spares: int
    listen: str | None  # not None: the agents that dial in are the hosts
    start_timeout_s: float
    elastic_timeout_s: float
    regroup_timeout_s: float
    failure_grace_s: float
    drain_timeout_s: float
    driver_timeout_s: float
    lease_s: float | None
    heartbeat_timeout_s: float
    stop_timeout_s: float
    join_window_s: float
    min_interrupt_distance_s: float
    preemption_cooldown_s: float
    health_check: str | None  # not None: a host is checked before workers start there
    collective_timeout_s: float | None  # the exit gate fails if others make no progress for so long
    reset_limit: int | None
    max_no_progress: int
    cooldown_range_s: tuple[float, float]
    stall_check_s: float | None
    stall_shutdown_s: float | None
    straggler_action: str  # warn or drain
    divergence: str  # off, warn or restore
    one_copy_per_host: bool  # one worker of each host keeps commits
    replicas: int | None  # None: 1 if the hosts of the world hold different shards, else 0
    durable_dir: str | None  # path or URL of the durable copies
    durable_timeout_s: float
    # No options: nobody has a reason to turn these.
    hold_timeout_s: float = HOLD_TIMEOUT_S
    preemption_window_s: float = 1.0  # from the first preemption notice to the interrupt; far shorter than any notice
    straggler_threshold: float = 0.2  # 20 % more own time than the others; noise stays below in measurements
    waiting_notice_s: float = 30.0  # seconds of a wait after which the event file gets a notice
    no_tick_notice_s: float = 60.0  # seconds without a tick after which the event file gets a notice

    def fewest(self, generation: int) -> int:
        """Return the smallest number of workers of the next world. ``generation``: the present one, or 0."""
        return self.np if self.horovod and generation == 0 else self.min_np

    def fitting(self, workers: int) -> int:
        """Return the size of the largest world that so many workers can form."""
        most = workers if self.max_np is None else min(workers, self.max_np)
        return most - most % self.np_multiple

    def why_spare(self, size: int) -> str:
        """Return why a worker waits as a spare beside a world of this size that it does not join."""
        if self.max_np is not None and size >= self.max_np:
            return f"--max-np is {self.max_np}"
        return f"worlds have a multiple of {self.np_multiple} workers"

    def fewest_text(self, generation: int) -> str:
        """Return ``fewest`` with its option, for messages."""
        option = "-np" if self.horovod and generation == 0 else "--min-np"
        return f"{option} is {self.fewest(generation)}"

    @property
    def counts_changes(self) -> bool:
        """True if planned changes of the world count towards --reset-limit, as failures do."""
        return self.horovod
