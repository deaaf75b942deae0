"""What the driver of ``launch()`` fetches from the agents, and writes down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from elasticstate.agent.result import part_of_result
from elasticstate.core.membership import new_membership, step
from elasticstate.core.policy import Policy
from elasticstate.core.records import Membership
from elasticstate.core.types import AgentJoined, HostsDiscovered, HostSlots, RootCause, WorkerExited, WorkerId
from elasticstate.driver.report import Outcome
from elasticstate.driver.returns import OUTCOME_FILE, Returns, Told, result_file, seats_of
from elasticstate.failures import WorkerFailure
from elasticstate.net import messages

SUCCEEDED = Outcome(0, "succeeded")


def finished() -> Membership:
    """Commands without ``run`` on two hosts, which have exited with 0 in another order than that of discovery."""
    m = new_membership(Policy(np=3, min_np=3, max_np=3))
    hosts = (HostSlots("b", 2), HostSlots("a", 1))
    events = [HostsDiscovered(hosts), AgentJoined("a", (), (), ()), AgentJoined("b", (), (), ())]
    for event in (*events, *(WorkerExited(w, 0, None, "") for w in [*map(worker, "ab"), WorkerId("b", 1, 1)])):
        m, _, _ = step(m, event, 0.0)
    return m


def worker(host: str) -> WorkerId:
    return WorkerId(host, 0, 1)


def test_functions_without_run_have_the_order_of_the_hosts() -> None:
    assert seats_of(finished()) == [("b", 0), ("b", 1), ("a", 0)]


def fetched(directory: Path, kept: dict[tuple[str, int], bytes], silent: str = "") -> Outcome:
    """From agents that have these results in files; one host does not answer."""
    job = directory / "job"
    job.mkdir()
    for (host, slot), data in kept.items():
        Path(directory, f"{host}.{slot}").write_bytes(data)

    async def run() -> Outcome:
        def send(host: str, question: messages.Fetch) -> None:
            part = part_of_result(str(directory / f"{host}.{question.slot}"), question.slot, question.offset)
            if host != silent:
                asyncio.get_running_loop().call_soon(returns.heard, host, part)

        returns = Returns(str(job), send)
        outcome = await returns.fetched(SUCCEEDED, finished(), 0.2)
        returns.write(outcome, [])
        return outcome

    return asyncio.run(run())


def test_results_of_several_parts_come_whole_and_none_is_no_file(tmp_path: Path) -> None:
    large = bytes(range(256)) * 10_000
    assert fetched(tmp_path, {("b", 0): large, ("a", 0): b"small"}) is SUCCEEDED
    results = [result_file(str(tmp_path / "job"), rank) for rank in range(3)]
    assert results[0].read_bytes() == large
    assert not results[1].exists()
    assert results[2].read_bytes() == b"small"
    told = msgspec.json.decode((tmp_path / "job" / OUTCOME_FILE).read_bytes(), type=Told)
    assert told == Told(0, "succeeded", 3, None, ())


def test_a_host_that_is_lost_with_its_results_fails_the_job(tmp_path: Path) -> None:
    outcome = fetched(tmp_path, {("b", 0): b"x"}, silent="a")
    assert (outcome.status, outcome.word) == (1, "failed")
    assert outcome.root_cause is not None
    assert outcome.root_cause.reason.endswith("what slot 0 of host a has returned was lost with the host")


def test_a_root_cause_is_one_of_the_failures(tmp_path: Path) -> None:
    cause = RootCause("b:0#1 had an error of its own", worker("b"), 0, 1, error="boom")
    other = WorkerFailure("a:0 ended: exit code 1", "a", 0, 1, 1, 1)
    Returns(str(tmp_path), lambda host, question: None).write(Outcome(1, "failed", cause), [other])
    told = msgspec.json.decode((tmp_path / OUTCOME_FILE).read_bytes(), type=Told)
    assert told.root_cause == WorkerFailure(cause.reason, "b", 0, 0, 1, error="boom")
    assert told.failures == (other, told.root_cause)
