"""Metrics, built from states of the real core: their names, types and numbers, and the files in deploy/prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
import urllib.parse
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elasticstate.core.accounting import figures_of
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.state import Digests, Membership, Running, Straggler
from elasticstate.core.types import CopyFigures
from elasticstate.driver.job import JobState
from elasticstate.driver.metrics import JobCollector, MetricsServer
from elasticstate.driver.status import overview_of
from elasticstate.errors import OptionError
from elasticstate.net.trust import Strangers
from elasticstate.options import read_options
from elasticstate.plug_ins import load_with_library
from tests.kit.core import ALL_KEPT, RUNNING, WHOLE_JOB, attach, drive
from tests.kit.policy import policy_of
from tests.kit.prometheus import CONFIG, DASHBOARD, PROMTOOL, RULES, WHY, promtool

Samples = dict[tuple[str, str], float]


def job_state(m: Membership) -> JobState:
    state = JobState(policy_of(np=2, min_np=1, max_np=2), 0.0)
    state.membership, state.reason = m, "training"
    return state


def over() -> Membership:
    return drive(WHOLE_JOB, np=2, min_np=1, max_np=2)[0]


def scraped(m: Membership) -> str:
    registry = CollectorRegistry()
    registry.register(JobCollector("j", job_state(m)))
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    """Return the value of each sample, by its name and the value of its label."""
    families = text_string_to_metric_families(text)
    found = [(s.name, "".join(s.labels.values()), s.value) for family in families for s in family.samples]
    return {(name, label): value for name, label, value in found}


def test_metrics_have_the_numbers_of_the_status() -> None:
    m, _ = drive("\n".join(WHOLE_JOB.strip().splitlines()[:-4]), np=2, min_np=1, max_np=2)
    overview, _ = overview_of("j", m, "training", 9.0)
    found = samples(scraped(m))
    assert found["elasticstate_job_info", "j"] == 1
    assert found["elasticstate_generation", ""] == overview.generation == 2
    assert found["elasticstate_world_size", ""] == 2
    assert found["elasticstate_world_living", ""] == overview.living == 1
    assert found["elasticstate_failures_total", ""] == overview.figures["failures"] == 2
    assert found["elasticstate_redone_ticks_total", ""] == 4
    assert found["elasticstate_ticks_total", ""] == 11, "seven that were kept, and four that were done again"
    assert found["elasticstate_phase", "forming"] == 1
    assert sum(found["elasticstate_phase", phase] for phase in ("waiting", "running", "failed", "finished")) == 0
    assert found["elasticstate_hosts", "joined"] == overview.hosts["joined"] == 1
    assert found["elasticstate_workers", "member"] == overview.workers["member"] == 1
    assert found["elasticstate_slots", ""] == 2


def test_durable_copies_are_shown_with_their_age() -> None:
    assert not [name for name, _ in samples(scraped(over())) if "durable" in name], "the job has no --durable-dir"
    state = job_state(drive(WHOLE_JOB, np=2, min_np=1, max_np=2, durable_dir="/copies")[0])
    registry = CollectorRegistry()
    registry.register(JobCollector("j", state))
    found = samples(generate_latest(registry).decode())
    assert found["elasticstate_durable_copies_total", ""] == 0
    assert ("elasticstate_durable_copy_age_seconds", "") not in found
    figures = state.durable
    figures.saved, figures.failed, figures.newest, figures.newest_at = 3, 2, CommitId(1, 9), time.monotonic() - 70
    found = samples(generate_latest(registry).decode())
    assert found["elasticstate_durable_copies_total", ""] == 3
    assert found["elasticstate_durable_copy_failures_total", ""] == 2
    assert found["elasticstate_durable_copy_age_seconds", ""] >= 70
    figures.trouble, figures.newest_bytes = "no space", 2_000_000
    assert list(figures.lines((figures.newest_at or 0.0) + 70)) == [
        "the newest is 70 s old: commit (1, 9), 2.0 MB; 3 saved, 2 failed",
        "the last attempt failed: no space",
    ]


def test_goodput_and_badput_are_the_wall_time() -> None:
    m = over()
    at = next(float(line.split()[0]) for line in WHOLE_JOB.strip().splitlines() if " gate " in line)
    found = samples(scraped(m))
    badput = {cause: value for (name, cause), value in found.items() if name == "elasticstate_badput_seconds"}
    assert found["elasticstate_goodput_seconds", ""] == pytest.approx(figures_of(m, at).times.goodput)
    total = found["elasticstate_goodput_seconds", ""] + sum(badput.values())
    assert total == pytest.approx(found["elasticstate_wall_seconds", ""])
    assert badput["regroup"] > 0
    assert badput["sync"] == 0, "each cause is there from the start"


def test_before_the_first_tick_there_is_no_ratio() -> None:
    m, _ = drive("0.0 hosts a:2", np=2)
    names = {name for name, _ in samples(scraped(m))}
    assert "elasticstate_goodput_ratio" not in names
    assert "elasticstate_commit_tick" not in names
    assert "elasticstate_badput_seconds" in names


def asked(request: bytes) -> tuple[str, list[str]]:
    """Return the answer of a server to a request, and the refusals that it has reported."""
    refusals: list[str] = []

    async def ask() -> str:
        server = MetricsServer("127.0.0.1:0", "j", job_state(over()), Strangers(5.0, lambda _, r: refusals.append(r)))
        port = urllib.parse.urlsplit(server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        return answer.decode(errors="replace")

    return asyncio.run(ask()), refusals


def request(*headers: str, first: str = "GET /metrics HTTP/1.1") -> bytes:
    return "\r\n".join([first, *headers, "", ""]).encode("latin-1")


def test_a_server_answers_until_it_is_closed() -> None:
    before = threading.active_count()
    answer, refusals = asked(request("Host: localhost:9100"))
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert samples(body)["elasticstate_job_info", "j"] == 1
    assert not refusals
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Host: 127.0.0.1:9100",), "200 OK"),
        (("Host: evil.example:9100",), "403 Forbidden"),
        (("Host: localhost", "Host: localhost"), "400 Bad Request"),
        ((), "400 Bad Request"),
        (("Host: localhost", "Accept: application/openmetrics-text;version=x"), "400 Bad Request"),
        (("Host: localhost", "Accept: \xff\x01"), "400 Bad Request"),
        (("Host: localhost", "no colon"), "400 Bad Request"),
        (("Host: localhost", "Accept: \xff"), "200 OK"),
    ],
)
def test_a_malformed_request_is_refused_and_counted(headers: tuple[str, ...], status: str) -> None:
    answer, refusals = asked(request(*headers))
    assert answer.startswith(f"HTTP/1.1 {status}\r\n")
    assert refusals == (["metrics: malformed request"] if status.startswith("400") else [])


def test_requests_of_other_kinds() -> None:
    assert asked(request(first="GET /metrics HTTP/1.0"))[0].startswith("HTTP/1.1 200 OK\r\n")
    assert asked(request("Host: localhost", first="POST / HTTP/1.1"))[0].startswith("HTTP/1.1 405 ")
    assert asked(request(first="GET / SPDY/1"))[0].startswith("HTTP/1.1 400 ")
    compressed = "Accept-Encoding: gzip"
    assert "Content-Encoding: gzip" in asked(request("Host: localhost", compressed))[0].partition("\r\n\r\n")[0]


def test_an_address_in_use_is_an_error_of_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            OptionError, match=rf"^--metrics: '{address}': cannot listen there \(Address already in use"
        ):
            MetricsServer(address, "j", job_state(over()), Strangers(5.0, print))


def test_without_the_library_the_option_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "elasticstate.driver.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match=r"^--metrics: requires .*pip install 'elasticstate\[metrics\]'\.$"):
        load_with_library("elasticstate.driver.metrics:metrics_served", "prometheus_client", "--metrics")


@pytest.mark.parametrize("text", ["x", "70000", "1.2.3.4", "localhost:9100", ""])
def test_a_bad_address_is_an_error_of_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="--metrics"):
        read_options({"np": "1", "metrics": text}, ["true"], {})


@pytest.mark.parametrize(("text", "address"), [("9100", "127.0.0.1:9100"), ("0.0.0.0:0", "0.0.0.0:0")])
def test_the_loopback_interface_is_the_default(text: str, address: str) -> None:
    assert read_options({"np": "1", "metrics": text}, ["true"], {}).metrics == address


def with_straggler() -> Membership:
    m, _ = drive(RUNNING)
    assert isinstance(m.phase, Running)
    straggler = Straggler(WorkerId("b", 1, 2), 1, 0.0, 1.5)
    return replace(m, phase=replace(m.phase, stragglers=(straggler,)))


def sharded() -> str:
    """Return the metrics of a sharded job with a complete replication and a durable copy."""
    m, _ = attach(durable_dir="/copies")
    state = job_state(drive(f"2.0 {ALL_KEPT.format('1.0')}", m)[0])
    state.copies.update("a", CopyFigures(1000, 30, 20), 1.0)
    state.copies.update("b", CopyFigures(2000, 0, 10), 1.0)
    registry = CollectorRegistry()
    registry.register(JobCollector("j", state))
    return generate_latest(registry).decode()


def exported() -> set[str]:
    return {name for text in (scraped(over()), scraped(with_straggler()), sharded()) for name, _ in samples(text)}


def test_a_sharded_job_has_the_age_of_its_line_and_replica_and_the_memory_and_bandwidth_of_copies() -> None:
    found = samples(sharded())
    assert found["elasticstate_replicas", ""] == 1
    assert found["elasticstate_kept_copies", ""] == 6
    assert found["elasticstate_kept_copies_bytes", "a"] == 1000
    assert found["elasticstate_kept_copies_bytes", "b"] == 2000
    assert found["elasticstate_replication_sent_bytes_total", ""] == 30
    assert found["elasticstate_replication_received_bytes_total", ""] == 30
    age = found["elasticstate_commit_line_age_seconds", ""] - found["elasticstate_replica_age_seconds", ""]
    assert age == pytest.approx(0.9), "1.1 and 2.0 s after the start"
    assert not [name for name, _ in samples(scraped(over())) if "cop" in name or "repli" in name], "not sharded"


def test_a_divergence_is_shown_for_its_generation() -> None:
    m = with_straggler()
    assert "elasticstate_divergent 0.0" in scraped(m)
    differing = structs.replace(m.ledger, digests=Digests(m.generation, text="commit (1, 4): rank 1 differs"))
    assert "elasticstate_divergent 1.0" in scraped(replace(m, ledger=differing))


def test_a_straggler_has_the_factor_of_its_own_time() -> None:
    found = samples(scraped(with_straggler()))
    assert [found[key] for key in found if key[0] == "elasticstate_straggler_factor"] == [1.5]
    assert 'elasticstate_straggler_factor{host="b",rank="1",slot="1"} 1.5' in scraped(with_straggler())


def used(path: Path) -> set[str]:
    return set(re.findall(r"\belasticstate_\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_alerts_and_dashboard_use_metrics_that_exist(path: Path) -> None:
    assert used(path)
    assert used(path) <= exported()


def test_each_panel_of_the_dashboard_shows_a_metric() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len(panels) >= 6
    for panel in panels:
        assert all("elasticstate_" in target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["targets"]


@pytest.mark.skipif(PROMTOOL is None, reason=WHY)
def test_promtool_accepts_metrics_configuration_and_rules() -> None:
    promtool("check", "metrics", input=scraped(with_straggler()))
    promtool("check", "metrics", input=scraped(over()))
    promtool("check", "metrics", input=sharded())
    promtool("check", "config", CONFIG)
    promtool("check", "rules", RULES)


@pytest.mark.skipif(PROMTOOL is None, reason=WHY)
def test_each_alert_fires_after_its_time_and_none_at_a_healthy_job() -> None:
    tests = Path(__file__).with_name("alerts_test.yml")
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))
    assert set(alerts) == set(re.findall(r"alertname: (\w+)", tests.read_text(encoding="utf-8")))
    promtool("test", "rules", tests)
