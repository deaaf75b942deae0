"""Overview of a job in numbers: the source of ``elasticrun status --json`` and of the metrics."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from elasticstate.core.accounting import figures_of, ticks_of
from elasticstate.core.figures import JobFigures
from elasticstate.core.membership import Membership, waiting_for
from elasticstate.core.records import Host, Over, Worker, living_members
from elasticstate.core.standstill import no_tick_text
from elasticstate.core.types import CommitId
from elasticstate.driver.copy_totals import CopyTotals
from elasticstate.driver.durable_figures import DurableFigures
from elasticstate.driver.shards_overview import ShardsOverview, shards_of

HOST_STATES = ("joined", "starting", "draining", "cooldown", "lost", "removed")
WORKER_STATES = ("booting", "ready", "member", "draining", "stopping")


class DurableOverview(Struct, frozen=True):
    """Durable copies of a job, as far as this driver has ordered them."""

    saved: int
    failed: int
    commit: CommitId | None  # in the newest copy
    age_s: float | None  # of the newest copy
    trouble: str  # why the last attempt failed; "" after a success


class Overview(Struct, frozen=True):
    """Overview of a job at one time."""

    job: str
    phase: str
    phase_s: float | None  # None: the job is over
    reason: str
    generation: int
    size: int  # of the newest world
    living: int  # of its members
    hosts: dict[str, int]  # by state
    slots: int  # of the hosts that discovery names
    workers: dict[str, int]  # by state
    ticks: int  # completed, those that were done again included
    commit: CommitId | None  # the newest
    waiting_for: tuple[str, ...]
    durable: DurableOverview | None  # None: no --durable-dir
    figures: dict[str, object]  # those of the event job_finished
    shards: ShardsOverview | None = None  # None: the job is not sharded


def overview_of(
    job: str,
    m: Membership,
    reason: str,
    now: float,
    durable: DurableFigures | None = None,
    copies: CopyTotals | None = None,
) -> tuple[Overview, JobFigures]:
    """Return the overview, and the figures in it. ``m`` never changes, so any thread may call this function."""
    figures = figures_of(m, now)
    hosts = Counter(host_state(host, now) for host in m.hosts.values())
    workers = Counter(worker_state(m, worker) for worker in m.workers.values())
    overview = Overview(
        job=job,
        phase=m.phase_name.partition("(")[0].lower(),
        phase_s=None if isinstance(m.phase, Over) else now - m.phase.since,
        reason=no_tick_text(m, now) or reason,
        generation=m.generation,
        size=m.world.size if m.world is not None else 0,
        living=len(living_members(m)),
        hosts={state: hosts[state] for state in HOST_STATES},
        slots=sum(host.slots for host in m.hosts.values()),
        workers={state: workers[state] for state in WORKER_STATES},
        ticks=ticks_of(m),
        commit=m.ledger.highest,
        waiting_for=waiting_for(m, now),
        durable=_durable(m, durable or DurableFigures(), now),
        figures=figures.fields(),
        shards=shards_of(m, now, copies),
    )
    return overview, figures


def _durable(m: Membership, figures: DurableFigures, now: float) -> DurableOverview | None:
    if m.policy.durable_dir is None:
        return None
    age_s = figures.age_s(now)
    return DurableOverview(figures.saved, figures.failed, figures.newest, age_s, figures.trouble)


def host_state(host: Host, now: float) -> str:
    if host.draining:
        return "draining"
    if not host.slots:
        return "removed"
    if host.cooldown_until > now:
        return "cooldown"
    if host.agent == "joined":
        return "joined"
    return "lost" if host.loss else "starting"


def worker_state(m: Membership, worker: Worker) -> str:
    if worker.gone:
        return "stopping"
    if worker.draining:
        return "draining"
    if worker.joined and worker.joined == m.generation:
        return "member"
    return "ready" if worker.ready is not None else "booting"
