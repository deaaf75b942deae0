"""A real Prometheus with the files of ``deploy/prometheus`` reads the metrics of a real job."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.kit.job import Hosts, Job
from tests.kit.prometheus import PROMETHEUS, WHY, Prometheus, each_panel_has_data, page_of, promtool

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason=WHY)

FAST = ("--join-window", "30", "--min-interrupt-distance", "0.2", "--cooldown-range", "0", "0")


def test_prometheus_sees_a_killed_worker_and_an_alert_fires(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path).set("localhost:2")
    durable = ("--durable-dir", str(tmp_path / "durable"), "--durable-interval", "0")
    options = ("-np", "2", *hosts.options, "--metrics", "0", *durable, *FAST)
    with Job(tmp_path, *options, steps=5, step_seconds=0.05, until=tmp_path / "stop") as job:
        url = page_of(job)
        with Prometheus(tmp_path / "prometheus", url.split("/")[2]) as prometheus:
            seen_training(prometheus, generation=1)
            assert prometheus.value("elasticstate_failures_total") == 0
            job.kill(1)
            seen_training(prometheus, generation=2)
            assert prometheus.value("elasticstate_failures_total") == 1
            with urllib.request.urlopen(url, timeout=60) as answer:
                promtool("check", "metrics", input=answer.read().decode())
            the_account_adds_up(prometheus)
            each_panel_has_data(prometheus, sharded=False)
            prometheus.wait_for("end of the first alerts", lambda: "ElasticstateWaits" not in prometheus.firing())
            hosts.set("localhost:1")
            text = prometheus.wait_for("alert", lambda: prometheus.firing().get("ElasticstateWaits"))
            assert text["summary"] == f"the job at {url.split('/')[2]} has too few workers"
            assert prometheus.value('elasticstate_phase{phase="waiting"}') == 1
            assert prometheus.value("elasticstate_slots") == 1
            hosts.set("localhost:2")
            seen_training(prometheus, generation=3)
            prometheus.wait_for("end of the alert", lambda: "ElasticstateWaits" not in prometheus.firing())
        job.stop_file.touch()
        job.finish()


def seen_training(prometheus: Prometheus, generation: int) -> None:
    """Wait until Prometheus has the numbers of a world of two that trains."""
    training = f'elasticstate_generation == {generation} and on() elasticstate_phase{{phase="running"}} == 1'
    prometheus.wait_for(f"generation {generation}", lambda: prometheus.value(training))
    members = 'elasticstate_workers{state="member"} == 2 and on() elasticstate_world_living == 2'
    prometheus.wait_for("two members", lambda: prometheus.value(members))
    assert prometheus.value("elasticstate_world_size") == 2
    prometheus.wait_for("new ticks", lambda: prometheus.value("delta(elasticstate_ticks_total[3s]) > 0"))


def the_account_adds_up(prometheus: Prometheus) -> None:
    """Check goodput + badput = wall time, by Prometheus' own arithmetic on its newest samples."""
    parts = "elasticstate_goodput_seconds + sum without (cause) (elasticstate_badput_seconds)"
    assert prometheus.value(f"({parts}) / elasticstate_wall_seconds") == pytest.approx(1)
    ratio = prometheus.value("elasticstate_goodput_ratio - elasticstate_goodput_seconds / elasticstate_wall_seconds")
    assert ratio == pytest.approx(0, abs=1e-6)
