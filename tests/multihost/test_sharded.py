"""Sharded models on several hosts: lost hosts, growth, and two hosts at once. The shards are those of the line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import Hosts, Job, Line

from tests.multihost.network import Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
STEPS = 200
TOLERANCE = 1e-4
QUICK = (
    *("--heartbeat-timeout", "2", "--min-interrupt-distance", "0.1", "--join-window", "5"),
    *("--cooldown-range", "0.2", "0.4", "--orphan-timeout", "20"),
)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c", "e", "f") as network:
        yield network


class ShardedJob(Job):
    """Job whose script trains a sharded model until the file ``stop`` exists, and at least some steps."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        how: str = "fsdp",
        within: tuple[str, ...] = (),
        pace: float = 0.0,
        steps: int = STEPS,
    ):
        folder.mkdir(exist_ok=True)
        self.steps = steps
        script = ["--log", str(folder / "logs"), "--how", how, "--steps", str(steps), "--step-seconds", str(pace)]
        until = ["--until", str(folder / "stop")] if pace else []
        super().__init__(folder, *options, within=within, command=[sys.executable, str(SCRIPT), *script, *until])

    def losses(self) -> dict[int, float]:
        """Return the loss of each step. For a step that was trained again, the last loss counts."""
        return {line["step"]: line["loss"] for line in self.log("step")}

    def trains_with(self, size: int, after: int = 0, steps: int = 10) -> int:
        """Wait until a world of this size, later than generation ``after``, has committed some steps."""

        def found() -> int:
            worlds = [e["generation"] for e in self.events("world_formed") if e["size"] == size]
            late = [g for g in worlds if g > after]
            counts = {g: len({c["step"] for c in self.log("commit") if c["generation"] == g}) for g in late}
            return next((g for g in late if counts[g] >= steps), 0)

        return int(self.wait_for(f"{steps} steps with {size} workers after generation {after}", found, timeout=120))

    def check_shards(self) -> None:
        """Check that each world begins with the full tensors of the step that it begins from, equal on all ranks."""
        begun: dict[int, list[Line]] = {}
        for line in self.log("enter"):
            begun.setdefault(line["generation"], []).append(line)
        for generation, lines in begun.items():
            assert len({(line["step"], line["digest"]) for line in lines}) == 1, lines
            step = lines[0]["step"]
            if not step:
                continue
            known = [e["digest"] for e in self.log("step") if e["step"] == step and e["generation"] < generation]
            assert lines[0]["digest"] in known, f"generation {generation} does not begin with the state of step {step}"

    def check_losses(self, undisturbed: dict[int, float]) -> float:
        """Return the largest deviation from the losses of an undisturbed run."""
        found = self.losses()
        return max(abs(found[step] / undisturbed[step] - 1) for step in range(1, self.steps + 1))


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
    network: Network, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    hosts = Hosts(tmp_path).set("a:1", "b:1", "c:1", "e:1")
    options = ("-np", "4", "--min-np", "2", *hosts.options, *QUICK)
    within = tuple(network["d"].storage.enter())
    with ShardedJob(tmp_path, *options, how="fsdp+tp", within=within, pace=0.02, steps=60) as job:
        first = job.trains_with(4)
        hosts.set("a:1", "e:1")
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
