"""Overview of a sharded job: its commit line, the replication, and the memory and bandwidth of the copies."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from elasticstate.core.layouts import ShardLayout
from elasticstate.core.membership import Membership
from elasticstate.core.replication import replicas_of
from elasticstate.core.texts import number_of
from elasticstate.core.types import CommitId
from elasticstate.driver.copy_totals import CopyTotals
from elasticstate.machine import format_bytes


class ReplicationOverview(Struct, frozen=True):
    """Replication in progress of one commit."""

    commit: CommitId
    done: int  # copies that are kept
    copies: int  # all of them
    since_s: float


class ShardsOverview(Struct, frozen=True):
    """Commit line and replication of a sharded job. Ages count from when the driver received the last report."""

    line: CommitId | None  # newest commit that all members have sealed
    line_age_s: float | None
    replicated: CommitId | None  # newest commit whose replication is complete
    replicated_age_s: float | None
    replicas: int  # other hosts that keep a copy of each shard, as --replicas says
    copies: int  # kept by the agents
    replication: ReplicationOverview | None  # in progress
    trouble: str  # why the replicas are fewer or older than they should be; "": they are not
    next_attempt_s: float | None  # until the next attempt, after one that failed
    memory: dict[str, int]  # by host: bytes of the copies
    memory_bytes: int  # on all hosts
    sent_bytes: int  # from host to host so far, as this driver has heard
    received_bytes: int
    bytes_per_s: float  # sent lately by all hosts together

    def lines(self) -> Iterator[str]:
        """Yield the lines of ``elasticrun status``."""
        line = f"commit line {self.line}, {self.line_age_s:.1f} s old" if self.line else "no commit line"
        if self.replicas:
            hosts = number_of(self.replicas, "other host")
            done = f"{self.replicated}, {self.replicated_age_s:.1f} s old" if self.replicated else "no commit yet"
            yield f"{line}; replicated on {hosts}: {done}"
        else:
            yield f"{line}; no replicas"
        if (present := self.replication) is not None:
            copies = f"{present.done} of {present.copies} copies"
            yield f"  in progress for {present.since_s:.1f} s: {present.commit}, {copies}"
        if self.trouble:
            later = "" if self.next_attempt_s is None else f"; the next one begins in {self.next_attempt_s:.1f} s"
            yield f"  {self.trouble}{later}"
        if self.copies or self.memory_bytes or self.sent_bytes:
            copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
            memory = f"{format_bytes(self.memory_bytes)} of memory on {number_of(len(self.memory), 'host')}"
            sent = f"{format_bytes(round(self.bytes_per_s))}/s, {format_bytes(self.sent_bytes)} in all"
            yield f"  {copies}, {memory}; sent from host to host: {sent}"


def shards_of(m: Membership, now: float, totals: CopyTotals | None = None) -> ShardsOverview | None:
    """Return the commit line and the replication of a sharded job."""
    shards, totals = m.shards, totals or CopyTotals()
    if not shards.layouts:
        return None
    present, memory = shards.replication, totals.memory()
    return ShardsOverview(
        line=shards.line,
        line_age_s=None if shards.line is None else now - shards.line_at,
        replicated=shards.replicated,
        replicated_age_s=None if shards.replicated is None else now - shards.replicated_at,
        replicas=replicas_of(m, shards.layouts[-1]),
        copies=sum(len(host.kept) for host in m.hosts.values() if host.agent == "joined"),
        replication=None
        if present is None
        else ReplicationOverview(
            present.commit, len(present.copies) - len(present.missing), len(present.copies), now - present.since
        ),
        trouble=_trouble(m, shards.layouts[-1], now),
        next_attempt_s=shards.not_before - now if _has_failed(m, now) else None,
        memory=memory,
        memory_bytes=sum(memory.values()),
        sent_bytes=totals.sent_bytes,
        received_bytes=totals.received_bytes,
        bytes_per_s=totals.bytes_per_s(now),
    )


def _trouble(m: Membership, layout: ShardLayout, now: float) -> str:
    shards, replicas = m.shards, replicas_of(m, layout)
    if not replicas:
        return ""
    usable = [host for host in m.hosts.values() if host.agent == "joined" and host.slots and not host.draining]
    others = max(0, len(usable) - 1)
    if others < replicas:
        if not others:
            return "there is no other host to keep copies"
        return f"copies need {number_of(replicas, 'other host')}, and only {others} can keep them"
    if _has_failed(m, now):
        attempts = "attempt" if shards.failures == 1 else f"{shards.failures} attempts"
        return f"the last {attempts} to replicate failed"
    return ""


def _has_failed(m: Membership, now: float) -> bool:
    """Return True between an attempt to replicate that failed and the next one."""
    return m.shards.replication is None and m.shards.failures > 0 and m.shards.not_before > now
