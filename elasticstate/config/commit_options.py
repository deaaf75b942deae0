"""Options for commits, and for their copies."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate import kinds
from elasticstate.config.option import option

COMMITS = "commits"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """Options for commits and their copies; see :class:`elasticstate.config.options.Options`."""

    commit_dir: str = option(
        "/dev/shm",
        COMMITS,
        kinds.PATH,
        "--commit-dir",
        "Directory of the commit storage, best in memory: two commits for each worker. A commit that does not fit is "
        "refused.",
    )
    commit_device_memory: int = option(
        0,
        COMMITS,
        kinds.BYTES,
        "--commit-device-memory",
        "Bytes of each worker's GPU memory that a commit may use. More memory means that training waits less.",
    )
    verify_sync: bool = option(
        False, COMMITS, kinds.FLAG, "--verify-sync", "Compare all states after each sync. A difference is an error."
    )
    tick_records: bool = option(
        False,
        COMMITS,
        kinds.FLAG,
        "--tick-records",
        "Record each tick, so that a failure repeats none if possible. Only on CPUs; replaces methods of torch.Tensor.",
    )
    one_copy_per_host: bool = option(
        False,
        COMMITS,
        kinds.FLAG,
        "--one-copy-per-host",
        "Keep commits of one worker of each host, from which the other workers there restore. All workers' values must "
        "be equal: they are compared at the first commit of each world.",
    )
    replicas: int | None = option(
        None,
        COMMITS,
        kinds.NUMBER,
        "--replicas",
        "Number of other hosts that keep a copy of each shard of a sharded state (default: 1 if a shard is on one host "
        "of several, else 0).",
    )
    replica_rate: int | None = option(
        None,
        COMMITS,
        kinds.BYTES_OR_OFF,
        "--replica-rate",
        "Most bytes per second that a host sends to other hosts for --replicas, for example 100M. off: no limit.",
    )
    durable_dir: str | None = option(
        None,
        COMMITS,
        kinds.PATH,
        "--durable-dir",
        "Directory, or URL of fsspec (s3://bucket/run), for durable copies of commits. A job that finds complete "
        "copies there resumes from the newest one.",
    )
    durable_interval_s: float = option(
        600.0,
        COMMITS,
        kinds.SECONDS,
        "--durable-interval",
        "Seconds between the begins of two durable copies.",
    )
    durable_keep: int = option(
        3, COMMITS, kinds.COUNT, "--durable-keep", "Number of durable copies to keep. Older ones are removed."
    )
    durable_timeout_s: float = option(
        60.0,
        COMMITS,
        kinds.at_least_s(1.0),
        "--durable-timeout",
        "Seconds a durable copy may be written or read without progress. After that the attempt has failed.",
    )
