"""Accounts of time for the report: the event's own account, or what older events have."""

from __future__ import annotations

from collections.abc import Iterable

from elasticstate.history.event_files import number
from elasticstate.history.job_history import JobHistory, Shares, shares_of


def parts_of(run: JobHistory) -> Shares | None:
    """Return the account of a finished job; None without one. Without an account in the event, the parts are goodput,
    downtime and other time."""
    e = run.finished
    if e is None:
        return None
    found = shares_of(e)
    share = number(e, "goodput")
    if found is not None or share is None:
        return found
    wall_s = e["time"] - run.began
    goodput, downtime = share * wall_s, e["downtime_s"] or 0.0
    parts = {"goodput": goodput, "downtime": downtime, "other": max(0.0, wall_s - goodput - downtime)}
    return Shares(wall_s, parts)


def share_names(accounts: Iterable[Shares]) -> list[str]:
    """Return the names of all parts: goodput, then the causes of badput, the largest first."""
    sums: dict[str, float] = {}
    for account in accounts:
        for name, seconds in account.parts.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sorted(sums, key=lambda name: (name != "goodput", -sums[name]))
