"""Metrics of a job for Prometheus, at http://ADDR:PORT/metrics (``--metrics``). Imported only with that option.

A thread, one at a time, reads the core's state, a value that never changes, so a scrape takes no lock and does not hold
up the event loop. Times are gauges, because the account corrects itself (docs/decisions/figures.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticstate.core.divergence import divergence_lines
from elasticstate.core.figures import CAUSES
from elasticstate.core.state import Phase, Running
from elasticstate.driver.job import JobState
from elasticstate.driver.status import ShardsOverview, overview_of
from elasticstate.errors import OptionError
from elasticstate.net.messages import HostUse
from elasticstate.net.names import host_port, is_own_host, listening_socket
from elasticstate.net.trust import Strangers
from elasticstate.net.web import Answer, Request, RequestHandler, WebPort
from elasticstate.options.kinds import split_address
from elasticstate.threads import in_thread

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
        differs = bool(divergence_lines(self._state.membership))
        yield _gauge("divergent", "1 if commits of the present generation differ between ranks.", float(differs))
        if figures.losses.downtime_s is not None:
            yield _gauge("downtime_seconds", "Time without training between worlds.", figures.losses.downtime_s)
        if overview.commit is not None:
            yield _gauge("commit_generation", "Generation of the newest commit.", overview.commit.generation)
            yield _gauge("commit_tick", "Tick of the newest commit in its generation.", overview.commit.tick)
        if overview.shards is not None:
            yield from _shards(overview.shards)
        yield from _hosts(state.readings.use)
        if values := {name: metric.value for name, metric in state.readings.metrics(state.membership).items()}:
            yield _by("user_metric", "Newest value that the lowest rank has reported.", "name", values)
        if overview.durable is not None:
            yield _counter("durable_copies", "Durable copies that were saved.", overview.durable.saved)
            yield _counter("durable_copy_failures", "Durable copies that could not be saved.", overview.durable.failed)
            if overview.durable.age_s is not None:
                yield _gauge("durable_copy_age_seconds", "Age of the newest durable copy.", overview.durable.age_s)


@asynccontextmanager
async def metrics_served(
    address: str, job: str, state: JobState, strangers: Strangers, log: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serve the metrics of a job at ``address``. Raises OptionError."""
    server = MetricsServer(address, job, state, strangers)
    log(f"metrics: {server.url}")
    try:
        yield
    finally:
        await server.close()


class MetricsServer:
    """HTTP server with the metrics of a job. Raises OptionError if it cannot listen at ``address``."""

    def __init__(self, address: str, job: str, state: JobState, strangers: Strangers) -> None:
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
        self._app = make_wsgi_app(registry)
        self._one_at_a_time = asyncio.Lock()
        self._port = WebPort("metrics", listening, strangers, lambda: RequestHandler(self._answer))
        self.url = f"http://{host_port(host, self._port.port)}/metrics"

    async def close(self) -> None:
        """Stop the server."""
        await self._port.close()

    async def _answer(self, request: Request) -> Answer:
        host = request.headers.get("host")
        if host is not None and request.visitor.is_loopback and not is_own_host(host):
            return Answer("403 Forbidden", b"Refused: the header Host must name this machine. Use its address.\n")
        await self._one_at_a_time.acquire()
        made = asyncio.ensure_future(self._made(request))
        made.add_done_callback(lambda _: self._one_at_a_time.release())
        return await asyncio.shield(made)  # a peer that goes away must not let the next one start another thread

    async def _made(self, request: Request) -> Answer:
        try:
            return await in_thread(self._page, request.method, request.target, request.headers)
        except Exception as error:
            first = error
        try:
            await in_thread(self._page, "GET", "/metrics", {})
        except Exception:
            logging.getLogger("elasticstate").error("the metrics of the job cannot be made", exc_info=first)
            return Answer("500 Internal Server Error", b"The metrics cannot be made.\n")
        request.visitor.refused("malformed request")  # one of its headers, or the query
        return Answer("400 Bad Request", b"Malformed request: a header or the query cannot be read.\n")

    def _page(self, method: str, target: str, headers: Mapping[str, str]) -> Answer:
        """Return what prometheus_client answers. It fails for some headers."""
        path, _, query = target.partition("?")
        environment: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        for name in ("Accept", "Accept-Encoding"):
            if name.lower() in headers:
                environment["HTTP_" + name.upper().replace("-", "_")] = headers[name.lower()]
        started: list[tuple[str, dict[str, str]]] = []
        body = b"".join(self._app(environment, lambda status, fields: started.append((status, dict(fields)))))
        return Answer(started[0][0], body, started[0][1])


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


def _hosts(use: Mapping[str, HostUse]) -> Iterator[Metric]:
    """Yield the use of the hosts. What a host does not measure is absent."""
    found = list(use.items())
    cpu = {host: each.cpu for host, each in found if each.cpu is not None}
    gpu = {host: each.gpu for host, each in found if each.gpu is not None}
    with_gpus = [(host, each) for host, each in found if each.gpus]
    for name, help, values in (
        ("host_cpu_ratio", "Share of its processors that a host uses.", cpu),
        ("host_memory_bytes", "Used memory of a host.", {host: each.memory_bytes for host, each in found}),
        ("host_memory_total_bytes", "Memory of a host.", {host: each.memory_total_bytes for host, each in found}),
        ("host_gpu_ratio", "Share of the time in which a GPU computed, mean of the host's GPUs.", gpu),
        ("host_gpu_memory_bytes", "Used memory of the GPUs.", {h: each.gpu_memory_bytes for h, each in with_gpus}),
        (
            "host_gpu_memory_total_bytes",
            "Memory of the GPUs.",
            {h: each.gpu_memory_total_bytes for h, each in with_gpus},
        ),
    ):
        if values:
            yield _by(name, help, "host", values)


def _by(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"elasticstate_{name}", help, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
