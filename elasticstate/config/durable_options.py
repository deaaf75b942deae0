"""Options for durable copies of commits."""

from __future__ import annotations

from dataclasses import dataclass

from elasticstate import kinds
from elasticstate.config.option import option

COMMITS = "commits"


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableOptions:
    """Options for durable copies; see :class:`elasticstate.config.options.Options`."""

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
