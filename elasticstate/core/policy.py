"""The options that the core's decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Options of the core. All times are in seconds; None means no limit. The modules in config/ describe each one."""

    np: int
    min_np: int
    max_np: int | None = None
    start_timeout_s: float = 600.0
    elastic_timeout_s: float = 600.0
    regroup_timeout_s: float = 60.0
    failure_grace_s: float = 2.0
    drain_timeout_s: float = 30.0
    driver_timeout_s: float = 300.0
    lease_s: float | None = None
    heartbeat_timeout_s: float = 10.0
    stop_timeout_s: float = 10.0
    hold_timeout_s: float = 2.0
    join_window_s: float = 5.0
    min_interrupt_distance_s: float = 5.0
    preemption_window_s: float = 1.0
    preemption_cooldown_s: float = 600.0
    gate_timeout_s: float | None = None
    reset_limit: int | None = None
    reset_window_s: float | None = None
    max_no_progress: int = 3
    cooldown_min_s: float = 10.0
    cooldown_max_s: float = 600.0
    waiting_notice_s: float = 30.0
