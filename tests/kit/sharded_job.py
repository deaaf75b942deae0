"""Real jobs that train a sharded model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.kit.job import Job, Line

SCRIPT = Path(__file__).parents[1] / "multihost" / "scripts" / "sharded.py"
STEPS = 200
QUICK = (
    *("--heartbeat-timeout", "2", "--min-interrupt-distance", "0.1", "--join-window", "30"),
    *("--cooldown-range", "0.2", "0.4", "--orphan-timeout", "20"),
)


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


ATTACHING = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import elasticstate as elastic
from elasticstate.state.base import committer_of

logs = sys.argv[1]
state = elastic.TorchState(step=0)

@elastic.run
def train(state):
    model = torch.nn.Linear(2, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (elastic.size(),)))
    state.attach(model=model, init=lambda: None)
    session = committer_of(state).session
    servers = dict(session.view.copy_servers)
    sources = [(s.digest, s.copy.host, s.copy.slot, s.copy.commit, servers[s.copy.host]) for s in session.view.sources]
    line = {"what": "attached", "time": time.time(), "generation": elastic.generation(), "rank": elastic.rank(),
            "size": elastic.size(), "pid": os.getpid(), "line": session.view.line, "sources": sources}
    with open(os.path.join(logs, f"{os.getpid()}.jsonl"), "a") as file:
        print(json.dumps(line), file=file)
    while True:
        dist.barrier()
        state.step += 1
        state.commit()
        time.sleep(0.02)
train(state)
"""


def attached(job: Job, generation: int, size: int) -> list[dict[str, Any]]:
    """Return what the members of a world wrote, by rank, when all have attached."""
    lines: list[dict[str, Any]] = job.wait_for(
        f"generation {generation} with {size} members",
        lambda: (
            [line for line in job.log("attached") if line["generation"] == generation][size - 1 : size]
            and sorted(
                (line for line in job.log("attached") if line["generation"] == generation), key=lambda x: x["rank"]
            )
        ),
    )
    return lines
