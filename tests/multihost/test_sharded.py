"""Sharded models on several hosts: lost hosts, growth, and two hosts at once. The shards are those of the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.job import Hosts
from tests.kit.network import Network, missing
from tests.kit.sharded_job import QUICK, STEPS, ShardedJob

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TOLERANCE = 1e-4


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c", "e", "f") as network:
        yield network


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one worker on this machine, with the same global batch."""
    with ShardedJob(tmp_path_factory.mktemp("undisturbed"), "-np", "1") as job:
        job.finish(0, timeout=120)
        assert [event["size"] for event in job.events("world_formed")] == [1]
        return job.losses()


def test_fsdp_survives_lost_hosts_and_grows(
    network: Network, tmp_path: Path, undisturbed: dict[int, float], record_property: Callable[[str, object], None]
) -> None:
    hosts = Hosts(tmp_path).set("a:1", "b:1", "c:1", "e:1")
    options = ("-np", "4", "--min-np", "2", "--max-np", "5", *hosts.options, *QUICK, "--replicas", "2")
    with ShardedJob(tmp_path, *options, within=tuple(network["d"].storage.enter()), pace=0.1) as job:
        first = job.trains_with(4)
        network["b"].power_off()
        three = job.trains_with(3, after=first)
        network["b"].power_on()
        hosts.set("a:1", "b:1", "c:1", "e:1", "f:1")
        five = job.trains_with(5, after=three)
        network["a"].power_off()
        network["e"].power_off()
        two = job.wait_for_event("world_formed", size=3)  # the first one, after b
        assert two["generation"] == three
        job.trains_with(3, after=five)
        job.stop_file.touch()
        job.finish(0, timeout=120)
    job.check_shards()
    deviation = job.check_losses(undisturbed)
    record_property(
        "report", f"FSDP2: largest deviation of the loss in {STEPS} steps on 4, 3, 5, 3 hosts: {deviation:.1e}"
    )
    assert deviation <= TOLERANCE


def test_hsdp_loses_a_host_without_a_replica_and_an_unreachable_line_ends_the_job(
    network: Network, tmp_path: Path
) -> None:
    """The other group of ranks has the shards of a lost host. Without groups, the error names the host."""
    hosts = ("-H", "a:1,b:1,c:1,e:1", "--replicas", "0", "--regroup-timeout", "4")
    soon = ("--driver-timeout", "1", "--stop-timeout", "1")  # an unreachable host gives up
    options = ("-np", "4", "--min-np", "1", *hosts, *QUICK, *soon)
    within = tuple(network["d"].storage.enter())
    with ShardedJob(tmp_path, *options, how="hsdp", within=within, pace=0.05) as job:
        first = job.trains_with(4)
        network["b"].power_off()
        three = job.trains_with(3, after=first)  # one group of three ranks
        job.check_shards()
        lost = job.wait_for_event("training_resumed", generation=three)
        assert lost["ticks_lost"] <= 1, "the tick in which the host was lost"
        network["c"].power_off()
        job.finish(1, timeout=60)
    (cause,) = job.events("root_cause")
    assert "StateLostError" in cause["reason"]
    assert "host c with shards of commit" in cause["reason"]
    assert {event["host"] for event in job.events("agent_lost")} == {"b", "c"}


def test_fsdp_with_tensor_parallelism_on_four_hosts_continues_on_two(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """The hosts are loopback addresses, as no link is cut."""
    hosts = Hosts(tmp_path).set("localhost:1", "127.0.0.2:1", "127.0.0.3:1", "127.0.0.4:1")
    options = ("-np", "4", "--min-np", "2", *hosts.options, *QUICK)
    with ShardedJob(tmp_path, *options, how="fsdp+tp", pace=0.02, steps=60) as job:
        first = job.trains_with(4)
        hosts.set("localhost:1", "127.0.0.4:1")
        job.trains_with(2, after=first)
        job.stop_file.touch()
        job.finish(0, timeout=120)
    job.check_shards()
    assert job.check_losses(undisturbed) <= TOLERANCE


def test_an_unreachable_line_is_awaited_then_a_durable_copy_decides(network: Network, tmp_path: Path) -> None:
    place = tmp_path / "copies"
    options = ("-np", "2", "--min-np", "1", "-H", "a:1,b:1", "--replicas", "0", "--regroup-timeout", "4", *QUICK)
    soon = ("--driver-timeout", "1", "--stop-timeout", "1", "--durable-dir", str(place), "--durable-interval", "1")
    with ShardedJob(tmp_path, *options, *soon, within=tuple(network["d"].storage.enter()), pace=0.05) as job:
        first = job.trains_with(2)
        copy = job.wait_for_event("durable_copy", state="saved")
        network["b"].power_off()
        job.trains_with(1, after=first)
        job.stop_file.touch()
        job.finish(0, timeout=120)
    lost, resumed = job.events("agent_lost")[0], job.events("training_resumed")[0]
    assert lost["host"] == "b"
    assert resumed["time"] - lost["time"] >= 4, "the host may return"
    (warning,) = [e["text"] for e in job.events("warning") if "the job resumes from" in e["text"]]
    assert "host b with shards of commit" in warning
    assert resumed["ticks_lost"] > 0
    assert "ticks_lost" in resumed["lower_bounds"]
    assert min(line["step"] for line in job.log("enter") if line["generation"] > first) >= copy["commit"][1]
    job.check_shards()
