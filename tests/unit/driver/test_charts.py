"""Reports of scripts and hosts, as dashboard and Prometheus get it: values by rank, curves, marks, use of hosts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elasticstate.core.ids import WorkerId
from elasticstate.driver.dashboard.charts import MARKS, MOST_MARKS, MOST_POINTS, Charts, Curve, Sampler, totals
from elasticstate.driver.dashboard.view import History, decoded, view_of
from elasticstate.driver.job import JobState, Readings
from elasticstate.driver.metrics import JobCollector
from elasticstate.failures import WorkerFailure
from elasticstate.net.messages import MOST_METRICS, HostUse, Stamps
from tests.kit.driver import state_after

GB = 1_000_000_000
USE = HostUse(0.5, 3 * GB, 4 * GB)
WITH_GPUS = HostUse(0.75, 2 * GB, 8 * GB, 2, 0.9, 60 * GB, 80 * GB)


def reported(state: JobState, *values: tuple[int, str, float], at: float = 1.0, use: HostUse | None = None) -> str:
    """Enter (slot, name, value) of the workers of host a."""
    metrics = tuple((WorkerId("a", slot, 1), ((name, value),)) for slot, name, value in values)
    return state.readings.update("a", Stamps((), metrics=metrics, use=use), state.membership, at)


def strict(view: Any) -> Any:
    """Return the view as a browser reads it: JSON without NaN."""
    return json.loads(msgspec.json.encode(view), parse_constant=lambda name: 1 / 0)


def test_the_value_of_a_name_is_that_of_the_lowest_rank() -> None:
    state = state_after(5)
    assert state.membership.workers[WorkerId("a", 1, 1)].rank == 1
    reported(state, (1, "loss", 3.0), (1, "only here", 7.0))
    assert state.readings.metrics(state.membership)["loss"].value == 3.0
    reported(state, (0, "loss", 2.0), at=2.0)
    metric = state.readings.metrics(state.membership)["loss"]
    assert (metric.value, metric.rank, sorted(metric.values)) == (2.0, 0, [2.0, 3.0])
    view = view_of("j", state, History(), 4.5, 1000.0)["metrics"]
    assert view["loss"] == {"value": 2.0, "workers": 2, "rank": 0, "least": 2.0, "greatest": 3.0}
    assert view["only here"]["rank"] == 1


def test_values_of_the_dead_do_not_count_but_the_last_one_stays() -> None:
    state, readings = state_after(5), Readings()
    gone = Stamps((), metrics=((WorkerId("a", 0, 9), (("loss", 5.0),)),))
    readings.update("a", gone, state.membership, 1.0)
    assert readings.metrics(state.membership) == {}
    reported(state, (0, "loss", 2.0))
    state.readings.metrics(state.membership)
    state.membership = replace(state.membership, workers={})
    assert state.readings.metrics(state.membership)["loss"].value == 2.0


def test_values_that_are_not_finite_are_words_in_the_view() -> None:
    state, history = state_after(5), History()
    reported(state, (0, "a", math.nan), (1, "a", 2.0), (0, "b", math.inf), (0, "c", -math.inf))
    Sampler(history.charts, state)(5.0)
    view = strict(view_of("j", state, history, 4.5, 1000.0))
    found = [view["metrics"][name]["value"] for name in "abc"]
    assert found == ["NaN", "infinity", "-infinity"]
    assert view["metrics"]["a"] == {
        "value": "NaN",
        "workers": 2,
        "rank": 0,
        "least": 2.0,
        "greatest": 2.0,
        "strange": 1,
    }
    assert "least" not in view["metrics"]["b"]
    points = [list(view["charts"]["curves"][f"metric:{name}"]["points"].values()) for name in "abc"]
    assert points == [[[1.0, "NaN"]], [[1.0, "infinity"]], [[1.0, "-infinity"]]]
    assert decoded(msgspec.json.encode(history)) == history


def test_a_job_has_a_limit_of_names() -> None:
    state = state_after(5)
    for number in range(MOST_METRICS):
        assert reported(state, (0, f"name {number}", number)) == ""
    assert reported(state, (0, "one more", 1.0), (1, "name 3", 4.0)) == "one more"
    assert reported(state, (0, "and one more", 1.0)) == "", "told once"
    assert len(state.readings.metrics(state.membership)) == MOST_METRICS


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=2000).map(sorted))
def test_a_curve_is_bounded_and_shows_all_of_the_time(times: list[float]) -> None:
    curve = Curve()
    for number, at in enumerate(times):
        curve.add(at, number)
    points = list(curve.points.values())
    assert 1 <= len(points) <= MOST_POINTS
    assert points[-1] == [round(times[-1], 1), len(times) - 1.0]
    assert float(points[0][0]) - times[0] <= curve.interval_s + 0.1
    assert [point[0] for point in points] == sorted(point[0] for point in points)


def test_marks_of_a_kill_a_hang_a_join_a_drain_and_a_new_driver() -> None:
    history, world = History(), {"generation": 1, "size": 2, "hosts": 1, "joined": ["a:0#1", "a:1#1"], "left": []}
    history.event("world_formed", world, 1.0)
    history.failure(WorkerFailure("a:1 ended: SIGKILL", "a", 1, 1, 1, signal=9), 10.0)
    history.failure(WorkerFailure("a:0 ended: SIGKILL", "a", 0, 0, 1, signal=9), 11.0)
    history.event("world_formed", {**world, "generation": 2, "joined": ["a:1#2"]}, 11.5)
    history.event("worker_unresponsive", {"worker": "a:1#2", "reason": "no heartbeat for 2 s"}, 20.0)
    history.failure(WorkerFailure("a:1 ended: SIGKILL", "a", 1, 1, 2, signal=9), 20.5)
    history.event("host_draining", {"host": "b", "reason": "spot"}, 30.0)
    history.event("driver_restarted", {"generation": 2, "epoch": 2, "back": [], "lost": []}, 40.0)
    history.event("agent_lost", {"host": "c", "reason": "is silent", "generation": 2}, 50.0)
    marks = list(strict(history.charts.view())["marks"].values())
    assert [(mark["kind"], mark["at"]) for mark in marks] == [
        ("failure", 10.0),
        ("join", 11.5),
        ("hang", 20.5),
        ("drain", 30.0),
        ("restart", 40.0),
        ("failure", 50.0),
    ]
    assert {mark["kind"] for mark in marks} == set(MARKS)
    assert marks[0]["text"] == "a:1 ended: SIGKILL; a:0 ended: SIGKILL"
    assert decoded(msgspec.json.encode(history)) == history, "the next driver has them"


def test_marks_are_bounded() -> None:
    charts = Charts()
    for number in range(1000):
        charts.mark("failure", 10.0 * number, "x" * 10_000)
    assert len(charts.marks) == MOST_MARKS
    assert len(msgspec.json.encode(charts)) < 100_000


def test_the_first_failures_and_the_newest_stay() -> None:
    history = History()
    for number in range(100):
        history.failure(WorkerFailure(f"failure {number}", "a", 0), float(number))
    kept = [entry["reason"] for entry in history.failures.values()]
    assert kept == [f"failure {number}" for number in (*range(10), *range(60, 100))]
    assert view_of("j", state_after(5), history, 4.5, 1000.0)["failed"] == 100


def test_the_sampler_adds_each_value_once_and_the_ticks() -> None:
    state, charts = state_after(5), Charts()
    sample = Sampler(charts, state)
    reported(state, (0, "loss", 2.0), at=100.0, use=USE)
    for second in range(10):
        sample(100.0 + second)
    assert list(charts.curves["metric:loss"].points.values()) == [[100.0, 2.0]]
    reported(state, (0, "loss", 2.0), at=105.0)
    sample(110.0)
    assert list(charts.curves["metric:loss"].points.values()) == [[100.0, 2.0], [105.0, 2.0]]
    assert [point[1] for point in charts.curves["own:ticks per second"].points.values()][-1] == 0.0
    assert {point[1] for point in charts.curves["own:processors"].points.values()} == {50.0}
    assert "own:GPUs" not in charts.curves


def test_the_use_of_hosts_with_and_without_gpus() -> None:
    assert totals({"a": USE}) == {"processors": 50.0, "memory": 75.0}
    both = totals({"a": USE, "b": WITH_GPUS})
    assert {name: round(value, 3) for name, value in both.items()} == {
        "processors": 62.5,
        "memory": 41.667,
        "GPUs": 90.0,
        "memory of GPUs": 75.0,
    }
    assert totals({}) == {}
    state = state_after(5)
    reported(state, use=WITH_GPUS)
    view = strict(view_of("j", state, History(), 4.5, 1000.0))
    assert view["hosts"]["a"]["use"] == WITH_GPUS._asdict()
    state.readings.host_lost("a")
    assert "use" not in view_of("j", state, History(), 4.5, 1000.0)["hosts"]["a"]


def test_prometheus_gets_the_values_and_the_use() -> None:
    state, registry = state_after(5), CollectorRegistry()
    reported(state, (0, 'a "name"\\', 2.0), (0, "nan", math.nan), use=WITH_GPUS)
    registry.register(JobCollector("j", state))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found["elasticstate_user_metric", 'a "name"\\'] == 2.0
    assert math.isnan(found["elasticstate_user_metric", "nan"])
    assert found["elasticstate_host_cpu_ratio", "a"] == 0.75
    assert found["elasticstate_host_memory_bytes", "a"] == 2 * GB
    assert found["elasticstate_host_memory_total_bytes", "a"] == 8 * GB
    assert found["elasticstate_host_gpu_ratio", "a"] == 0.9
    assert found["elasticstate_host_gpu_memory_bytes", "a"] == 60 * GB
    assert found["elasticstate_host_gpu_memory_total_bytes", "a"] == 80 * GB
