"""``report_metric``: which names and values it takes, what is sent and when, outside of a job, in a forked child."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import elasticstate
from elasticstate import report_metric
from elasticstate.core.ids import WorkerId
from elasticstate.errors import UsageError
from elasticstate.net import messages
from elasticstate.net.link import AgentSocket
from elasticstate.options import WorkerEnvironment
from elasticstate.worker import user_metrics

INTERVAL_S = 0.2


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The values of each message of this process, which is a worker."""
    found: list[dict[str, float]] = []
    for name, value in {"INTERVAL_S": INTERVAL_S, "_sent_at": {}, "_newest": {}, "_due_at": 0.0}.items():
        monkeypatch.setattr(user_metrics, name, value)
    monkeypatch.setattr(user_metrics, "_send", None)
    monkeypatch.setattr(user_metrics, "_is_worker", True)
    user_metrics.start(lambda message: found.append(dict(message.values)))
    return found


def test_a_new_name_is_sent_at_once_and_the_newest_value_later(sent: list[dict[str, float]]) -> None:
    for number in range(100):
        report_metric("loss", number)
        report_metric("accuracy", -number)
    assert sent == [{"loss": 0.0}, {"accuracy": 0.0}]
    user_metrics.end_tick()
    assert len(sent) == 2, "not due"
    time.sleep(INTERVAL_S)
    user_metrics.end_tick()
    assert sent[2:] == [{"loss": 99.0, "accuracy": -99.0}]
    user_metrics.end_tick()
    user_metrics.end()
    assert len(sent) == 3, "nothing is new"
    report_metric("loss", 1)
    user_metrics.end()
    assert sent[3:] == [{"loss": 1.0}]


def test_a_name_that_is_due_takes_the_others_along(sent: list[dict[str, float]]) -> None:
    for number in range(3):
        report_metric("a", number)
        report_metric("b", number)
        time.sleep(INTERVAL_S / 2)
    report_metric("a", 3)
    assert sent[2:] in ([{"a": 2.0}, {"b": 2.0}], [{"a": 2.0, "b": 1.0}], [{"a": 3.0, "b": 2.0}])
    user_metrics.end()
    newest: dict[str, float] = {}
    for values in sent:
        newest.update(values)
    assert newest == {"a": 3.0, "b": 2.0}


NUMBERS = [
    (1, 1.0),
    (True, 1.0),
    (Fraction(1, 4), 0.25),
    (torch.tensor(2.5), 2.5),
    (torch.tensor([[3]]), 3.0),
    (torch.nn.Parameter(torch.tensor(4.0)) * 1, 4.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (math.inf, math.inf),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("value", "number"), NUMBERS)
def test_numbers(sent: list[dict[str, float]], value: float, number: float) -> None:
    report_metric("x", value)
    assert sent == [{"x": number}]


def test_not_a_number_is_a_value(sent: list[dict[str, float]]) -> None:
    report_metric("x", math.nan)
    assert math.isnan(sent[0]["x"])


@pytest.mark.parametrize("value", ["1.5", b"1", None, 1j, [1.0], torch.ones(2), torch.tensor(1j), 10**400, {}])
def test_other_values_are_errors_of_the_call(sent: list[dict[str, float]], value: object) -> None:
    with pytest.raises(UsageError, match=r"'x'.*is no number"):
        report_metric("x", value)  # type: ignore[arg-type]
    assert not sent


@pytest.mark.parametrize("name", ["", "x" * 81, "a\nb", "\ud800", "a\0", None, 1, ["a"]])
def test_bad_names_are_errors_of_the_call(sent: list[dict[str, float]], name: str) -> None:
    with pytest.raises(UsageError, match="report_metric"):
        report_metric(name, 1.0)
    assert not sent


def test_names_have_a_limit(sent: list[dict[str, float]]) -> None:
    for number in range(user_metrics.MOST_NAMES):
        report_metric(f"<b>name {number}</b>", number)
    with pytest.raises(UsageError, match="64 names already"):
        report_metric("one more", 1.0)
    report_metric("<b>name 0</b>", 5.0)
    user_metrics.end()
    assert sent[-1] == {"<b>name 0</b>": 5.0}


def test_a_tensor_on_a_device_is_copied_until_it_is_sent(sent: list[dict[str, float]]) -> None:
    """Without a device that computes: the device "meta" has no values, so that reading one fails."""
    report_metric("loss", 1.0)
    report_metric("loss", torch.ones((), device="meta"))
    assert isinstance(user_metrics._newest["loss"], torch.Tensor), "it is not read yet"
    user_metrics.end()
    assert sent == [{"loss": 1.0}, {}], "a device that fails says so itself"


def test_a_forked_child_reports_nothing(sent: list[dict[str, float]]) -> None:
    child = os.fork()
    if child == 0:
        report_metric("loss", 2.0)
        user_metrics.end()
        os._exit(len(sent))
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_job_only_the_arguments_are_checked() -> None:
    program = (
        "import elasticstate as e\nfor n in range(1000): e.report_metric(f'name {n}', n)\n"
        "try:\n    e.report_metric('', 1)\nexcept e.UsageError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_a_worker_without_run_has_a_connection_of_its_own(tmp_path: Path) -> None:
    received: list[tuple[WorkerId, messages.FromWorkerBody]] = []
    worker = WorkerId("h", 0, 1)

    async def scenario() -> None:
        complaints: list[str] = []
        agent = AgentSocket(
            str(tmp_path / "agent"),
            lambda who: "" if who == worker else "is a stranger",
            lambda who, message: received.append((who, message)),
            lambda *_: None,
            complaints.append,
        )
        agent.open()
        text = "import elasticstate as e\nfor n in range(5): e.report_metric('loss', n)\n"
        told = WorkerEnvironment(str(tmp_path / "agent"), "m", worker, "j", "i", "127.0.0.1", "/e", (), "gloo")
        environment = {**os.environ, **told.variables()}
        script = await asyncio.create_subprocess_exec(sys.executable, "-c", text, env=environment)
        assert await script.wait() == 0
        agent.drain(worker)
        agent.close()
        assert not complaints

    asyncio.run(scenario())
    values = [message.values for who, message in received if isinstance(message, messages.Metrics) and who == worker]
    assert values == [(("loss", 0.0),), (("loss", 4.0),)], "the last one when the process ends"


def test_the_function_is_public() -> None:
    assert elasticstate.report_metric is user_metrics.report_metric
