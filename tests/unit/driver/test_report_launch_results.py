"""Results of ``launch()``: the driver fetches them from the agents, and writes them to files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from elasticstate.agent.host_storage import Results
from elasticstate.commits import result_hasher
from elasticstate.core.ids import HostSlots, WorkerId
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from elasticstate.core.types import AgentJoined, HostsDiscovered, RootCause, WorkerExited
from elasticstate.driver.report import (
    OUTCOME_FILE,
    LaunchOutcome,
    LaunchResults,
    Outcome,
    result_name,
    slots_of,
)
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages
from tests.kit.policy import policy_of

SUCCEEDED = Outcome(0, "succeeded")
KEY = b"the key of the job"


def finished() -> Membership:
    """Commands without ``run`` on two hosts. They have exited with 0, in another order than that of discovery."""
    m = new_membership(policy_of(np=3, min_np=3, max_np=3))
    hosts = (HostSlots("b", 2), HostSlots("a", 1))
    events = [HostsDiscovered(hosts), AgentJoined("a", (), (), ()), AgentJoined("b", (), (), ())]
    for event in (*events, *(WorkerExited(w, 1, 0, None, "") for w in [*map(worker, "ab"), WorkerId("b", 1, 1)])):
        m, _, _ = step(m, event, 0.0)
    return m


def worker(host: str) -> WorkerId:
    return WorkerId(host, 0, 1)


def test_functions_without_run_have_the_order_of_the_hosts() -> None:
    assert slots_of(finished()) == [("b", 0), ("b", 1), ("a", 0)]


def tagged(data: bytes, key: bytes = KEY) -> bytes:
    """Return the content of a result file, as a worker of a job with this key writes it."""
    hasher = result_hasher(key)
    hasher.update(data)
    tag: bytes = hasher.digest()
    return tag + data


def fetched(directory: Path, kept: dict[tuple[str, int], bytes], silent: str = "", key: bytes = KEY) -> Outcome:
    """Fetch from agents that have these results in files. The host ``silent`` does not answer."""
    job = directory / "job"
    job.mkdir(mode=0o700)
    results = {host: Results(key) for host in "ab"}
    for (host, slot), data in kept.items():
        Path(directory, f"{host}.{slot}").write_bytes(tagged(data))

    async def run() -> Outcome:
        def send(host: str, question: messages.Fetch) -> None:
            path = directory / f"{host}.{question.slot}"
            path.touch()
            with path.open("rb") as file:
                part = results[host].part(file.fileno(), question.slot, question.offset)
            if host != silent:
                asyncio.get_running_loop().call_soon(returns.received, host, part)

        returns = LaunchResults(str(job), send)
        outcome = await returns.fetched(SUCCEEDED, finished(), 0.2)
        returns.write(outcome, [])
        return outcome

    return asyncio.run(run())


def test_results_of_several_parts_come_whole_and_none_is_no_file(tmp_path: Path) -> None:
    large = bytes(range(256)) * 10_000
    assert fetched(tmp_path, {("b", 0): large, ("a", 0): b"small"}) is SUCCEEDED
    results = [tmp_path / "job" / result_name(rank) for rank in range(3)]
    assert results[0].read_bytes() == large
    assert not results[1].exists()
    assert results[2].read_bytes() == b"small"
    launch_outcome = msgspec.json.decode((tmp_path / "job" / OUTCOME_FILE).read_bytes(), type=LaunchOutcome)
    assert launch_outcome == LaunchOutcome(0, "succeeded", 3, None, ())


def test_a_host_that_is_lost_with_its_results_fails_the_job(tmp_path: Path) -> None:
    outcome = fetched(tmp_path, {("b", 0): b"x"}, silent="a")
    assert (outcome.status, outcome.word) == (1, "failed")
    assert outcome.root_cause is not None
    assert outcome.root_cause.reason.endswith("host a did not send the result of slot 0")


def test_a_result_that_no_worker_of_the_job_has_written_is_none(tmp_path: Path) -> None:
    outcome = fetched(tmp_path, {("b", 0): b"x", ("a", 0): b"y"}, key=b"another key")
    assert outcome.status == 1
    assert not list((tmp_path / "job").glob("*.result"))


def test_a_root_cause_is_one_of_the_failures(tmp_path: Path) -> None:
    cause = RootCause("b:0#1 failed with its own error", worker("b"), 0, 1, error="boom")
    other = WorkerFailure("a:0 ended: exit code 1", "a", 0, 1, 1, 1)
    tmp_path.chmod(0o700)
    LaunchResults(str(tmp_path), lambda host, question: None).write(Outcome(1, "failed", cause), [other])
    launch_outcome = msgspec.json.decode((tmp_path / OUTCOME_FILE).read_bytes(), type=LaunchOutcome)
    assert launch_outcome.root_cause == WorkerFailure(cause.reason, "b", 0, 0, 1, error="boom")
    assert launch_outcome.failures == (other, launch_outcome.root_cause)
