"""Metrics of a job for Prometheus, at http://ADDR:PORT/metrics (``--metrics``). Imported only with that option.

The server has threads of its own. They read the core's state, a value that never changes, so a scrape takes no lock and
does not hold up the event loop. Between two scrapes the server sleeps: prometheus_client's own one wakes up twice a
second.

Times are gauges, because the account corrects itself: redone ticks are moved from goodput to badput. Prometheus would
read a counter that falls as a restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticstate.core.phases import Phase, Running
from elasticstate.core.time_account import CAUSES
from elasticstate.driver.job_state import JobState
from elasticstate.driver.overview import overview_of
from elasticstate.driver.shards_overview import ShardsOverview
from elasticstate.errors import OptionError
from elasticstate.kinds import split_address
from elasticstate.net.http_server import HttpServer
from elasticstate.net.listening import listening_socket, port_of

_PHASES = ("waiting", "forming", "running", "finishing", "finished", "failed")


class JobCollector(Collector):
    """Metrics of one job, made anew for each scrape."""

    def __init__(self, job: str, state: JobState) -> None:
        self._job = job
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        now = time.monotonic()
        overview, figures = overview_of(self._job, state.membership, state.reason, now, state.durable, state.copies)
        yield InfoMetricFamily("elasticstate_job", "Name of the job.", {"job_name": self._job})
        yield _gauge("wall_seconds", "Time since the start of the job: goodput and badput.", figures.wall_s)
        yield _gauge("goodput_seconds", "Time of ticks that were completed and kept.", figures.times.goodput)
        causes: dict[str, float] = {cause: getattr(figures.times, cause) for cause in CAUSES}
        yield _by("badput_seconds", "All other time, by cause.", "cause", causes)
        if figures.goodput is not None:
            yield _gauge("goodput_ratio", "Goodput as a share of the wall time.", figures.goodput)
        yield _by("phase", "1 for the present phase.", "phase", {p: p == overview.phase for p in _PHASES})
        yield _gauge("phase_seconds", "Time in the present phase.", overview.phase_s or 0.0)
        yield _gauge("generation", "Number of the newest world.", overview.generation)
        yield _gauge("world_size", "Workers in the newest world when it was formed.", overview.size)
        yield _gauge("world_living", "Living members of the newest world.", overview.living)
        yield _by("hosts", "Hosts, by state.", "state", overview.hosts)
        yield _by("workers", "Workers, by state.", "state", overview.workers)
        yield _gauge("slots", "Slots of the hosts that discovery names.", overview.slots)
        yield _gauge("waiting_for", "Hosts, slots and workers that the job waits for.", len(overview.waiting_for))
        yield _counter("ticks", "Completed ticks, those that were done again included.", overview.ticks)
        yield _counter("failures", "Unplanned ends of generations.", figures.failures)
        yield _counter("redone_ticks", "Ticks that were done again.", figures.losses.ticks)
        yield _counter("lost_commits", "Commits of all workers that were lost.", figures.losses.commits)
        yield _stragglers(self._state.membership.phase)
        if figures.losses.downtime_s is not None:
            yield _gauge("downtime_seconds", "Time without training between worlds.", figures.losses.downtime_s)
        if overview.commit is not None:
            yield _gauge("commit_generation", "Generation of the newest commit.", overview.commit.generation)
            yield _gauge("commit_tick", "Tick of the newest commit in its generation.", overview.commit.tick)
        if overview.shards is not None:
            yield from _shards(overview.shards)
        if overview.durable is not None:
            yield _counter("durable_copies", "Durable copies that were saved.", overview.durable.saved)
            yield _counter("durable_copy_failures", "Durable copies that could not be saved.", overview.durable.failed)
            if overview.durable.age_s is not None:
                yield _gauge("durable_copy_age_seconds", "Age of the newest durable copy.", overview.durable.age_s)


class MetricsServer:
    """HTTP server with the metrics of a job. Raises OptionError if it cannot listen at ``address``."""

    def __init__(self, address: str, job: str, state: JobState) -> None:
        host, port = split_address(address)
        try:
            listening = listening_socket(host, port)
        except OSError as error:
            raise OptionError(
                f"--metrics: {address!r}: cannot listen there ({error.strerror}). Choose an address of this machine "
                "and a free port."
            ) from None
        registry = CollectorRegistry()
        registry.register(JobCollector(job, state))
        self._server = HttpServer(listening, MetricsHandler.factory(registry))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port_of(listening)}/metrics"

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"elasticstate_{name}", help, value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"elasticstate_{name}", help, value)


def _stragglers(phase: Phase) -> Metric:
    help = "Own time per tick of a persistently slow rank, divided by the median of the others'."
    family = GaugeMetricFamily("elasticstate_straggler_factor", help, labels=["host", "slot", "rank"])
    for straggler in phase.stragglers if isinstance(phase, Running) else ():
        host, slot = straggler.worker.slot_id
        family.add_metric([host, str(slot), str(straggler.rank)], straggler.factor)
    return family


def _shards(shards: ShardsOverview) -> Iterator[Metric]:
    """Yield the metrics of a sharded job. An age is absent while there is no such commit."""
    if shards.line_age_s is not None:
        yield _gauge("commit_line_age_seconds", "Age of the newest commit of all members.", shards.line_age_s)
    if shards.replicated_age_s is not None:
        yield _gauge("replica_age_seconds", "Age of the newest replicated commit.", shards.replicated_age_s)
    yield _gauge("replicas", "Other hosts that are to keep a copy of each shard.", shards.replicas)
    yield _gauge("kept_copies", "Copies of shards that agents keep.", shards.copies)
    yield _by("kept_copies_bytes", "Memory of the kept copies, by host.", "host", shards.memory)
    yield _counter("replication_sent_bytes", "Bytes of copies that hosts have sent to others.", shards.sent_bytes)
    yield _counter("replication_received_bytes", "Bytes of copies that hosts have received.", shards.received_bytes)


def _by(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"elasticstate_{name}", help, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
