"""The cost of a page and of a scrape at 1,000 workers, relative to what the driver does each second in any case.

Both are CPU times of this thread, the least of several by turns, so other load on the machine changes no verdict.
``bench_control_plane.py`` measures a real driver.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from elasticstate.core import types as t
from elasticstate.core.step import step
from elasticstate.driver.dashboard.server import Viewers
from elasticstate.driver.dashboard.view import History, view_of
from elasticstate.driver.job import JobState
from elasticstate.driver.metrics import JobCollector
from tests.bench.bench_membership import trained_world

WORKERS, ROUNDS, MOST = 1000, 5, 10


def cpu_s(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def test_a_page_and_a_scrape_cost_no_more_than_ten_times_the_heartbeats_of_a_second() -> None:
    m, _ = trained_world(WORKERS)
    state, now = JobState(m.policy, 0.0), 10.0
    state.membership = m
    registry = CollectorRegistry()
    registry.register(JobCollector("j", state))
    costs: dict[str, list[float]] = {"heartbeats": [], "page": [], "scrape": []}

    def heartbeats(tick: int) -> t.Several:
        return t.Several(
            tuple(t.FromWorker(w, t.Stamp(t.Place.TRAIN, 1, tick, t.CommitId(1, tick))) for w in m.workers)
        )

    def take(event: t.Event) -> None:
        state.membership, _, state.reason = step(state.membership, event, now)

    async def watch() -> None:
        nonlocal now
        viewers = Viewers(lambda: view_of("j", state, History(), now, 1000.0))
        stream = viewers.messages()
        await anext(stream)
        for tick in range(2, 2 + ROUNDS):
            now += 1.0
            costs["heartbeats"].append(cpu_s(functools.partial(take, heartbeats(tick))))
            costs["page"].append(cpu_s(viewers.publish))
            costs["scrape"].append(cpu_s(lambda: generate_latest(registry)))
            assert (await anext(stream)).count(b'"tick":%d' % tick) == WORKERS
        await stream.aclose()
        viewers.close()

    asyncio.run(watch())
    least = {name: min(found) for name, found in costs.items()}
    assert least["page"] <= MOST * least["heartbeats"], least
    assert least["scrape"] <= MOST * least["heartbeats"], least
