"""A real Prometheus, and its promtool: those of the machine, or those that ``make hosts`` unpacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.job import Job

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
CONFIG, RULES, DASHBOARD = (DEPLOY / name for name in ("prometheus.yml", "alerts.yml", "dashboard.json"))
WHY = "prometheus is not installed (make hosts)"
INTERVAL_S = 1  # between two scrapes, and between two evaluations of the rules

Labels = dict[str, str]


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(ROOT / ".programs"))


PROMETHEUS, PROMTOOL = program("prometheus"), program("promtool")


def promtool(*arguments: str | Path, input: str | None = None) -> None:
    """Run promtool. Raises AssertionError with its output if it reports a problem."""
    assert PROMTOOL is not None, WHY
    command = [PROMTOOL, *map(str, arguments)]
    done = subprocess.run(command, input=input, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout


class Prometheus:
    """A Prometheus with the configuration and the rules of ``deploy/prometheus``, for one job.

    It scrapes and evaluates each second, and alerts have no ``for``, so that a test waits for seconds and not minutes.
    """

    def __init__(self, folder: Path, target: str) -> None:
        """``target``: address of the metrics."""
        self._log, self._folder = folder / "log", folder
        folder.mkdir()
        config = replaced(CONFIG.read_text(), r"127\.0\.0\.1:9100", target, 1)
        config = replaced(config, r"_interval: \d+s", f"_interval: {INTERVAL_S}s", 2)
        (folder / CONFIG.name).write_text(config)
        (folder / RULES.name).write_text(replaced(RULES.read_text(), r"for: \d+m", "for: 0s", 7))

    def __enter__(self) -> Prometheus:
        assert PROMETHEUS is not None, WHY
        options = (f"--config.file={self._folder / CONFIG.name}", f"--storage.tsdb.path={self._folder / 'data'}")
        command = [PROMETHEUS, *options, "--web.listen-address=127.0.0.1:0"]
        with open(self._log, "wb") as log:
            environment = {**os.environ, "GOMAXPROCS": "1"}
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            found = wait_for("start of Prometheus", self._address, lambda: self._log.read_text())
        except BaseException:
            self.__exit__()
            raise
        self._url = f"http://{found}/api/v1/"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _address(self) -> str | None:
        """Return the address when the server answers; before, it refuses queries with 503."""
        log = self._log.read_text()
        found = re.search(r'msg="Listening on" address=(\S+)', log)
        return found[1] if found and "Server is ready to receive web requests" in log else None

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer. Raises urllib.error.HTTPError, for example for a query that is malformed."""
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return the labels and the newest value of each series."""
        return [(each["metric"], float(each["value"][1])) for each in self.get("query", query=expression)["result"]]

    def value(self, expression: str) -> float | None:
        """Return the newest value of the only series; None: there is no series."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        return wait_for(what, condition, lambda: json.dumps(self.get("targets")["activeTargets"]))

    def firing(self) -> dict[str, Labels]:
        """Return the names of the alerts that fire, with their annotations."""
        alerts = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"]: each["annotations"] for each in alerts if each["state"] == "firing"}


def replaced(text: str, pattern: str, by: str, count: int) -> str:
    """Replace all matches, which must be so many."""
    text, found = re.subn(pattern, by, text)
    assert found == count, f"{pattern}: {found} matches, not {count}"
    return text


def wait_for(what: str, condition: Callable[[], Any], about: Callable[[], str], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout} s: {about()}"
        time.sleep(0.05)
    return found


def page_of(job: Job) -> str:
    """Return the address of the metrics, which ``elasticrun`` has printed."""
    pattern = r"^elasticrun: metrics: (http://127\.0\.0\.1:\d+/metrics)$"
    (url,) = job.wait_for("address", lambda: re.findall(pattern, job.output, re.MULTILINE))
    return str(url)


def each_panel_has_data(prometheus: Prometheus, sharded: bool) -> None:
    """Check the queries of the Grafana dashboard: those of a sharded job, or all others."""
    ((labels, _),) = prometheus.query("elasticstate_generation")
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    panels = [panel for panel in panels if sharded == panel["description"].startswith("Only of a sharded job")]
    assert panels
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$instance", labels["instance"])
            assert prometheus.query(query), (panel["title"], query)
