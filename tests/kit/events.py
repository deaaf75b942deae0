"""Hand-written events of a job, as ``elasticrun`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


class EventLines:
    """Event file of one job under construction. Times are seconds since the start of the job."""

    def __init__(self, path: Path, job: str = "job-1", began: float = BEGAN) -> None:
        self.path = path
        self._job = job
        self._began = began
        self.generation = 0

    def add(self, time: float, event: str, /, **fields: Any) -> EventLines:
        line = {"time": self._began + time, "event": event, "job": self._job, "generation": self.generation, **fields}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def start(self, np: int = 2, at: float = 0.0) -> EventLines:
        self.generation = 0
        sizes = {"np": np, "min_np": 1, "max_np": None, "np_multiple": 1}
        return self.add(at, "job_started", pid=1, command=["python", "train.py"], **sizes)

    def host(self, at: float, host: str, slots: int) -> EventLines:
        return self.add(at, "host_added", host=host, slots=slots).add(at, "agent_joined", host=host, pid=2)

    def worker(self, at: float, event: str, worker: str, **fields: Any) -> EventLines:
        host, _, rest = worker.rpartition(":")
        return self.add(at, f"worker_{event}", worker=worker, host=host, slot=int(rest.partition("#")[0]), **fields)

    def exited(
        self,
        at: float,
        worker: str,
        rank: int | None,
        code: int | None = None,
        signal: int | None = None,
        error: str = "",
    ) -> EventLines:
        end = {"exit_code": code, "signal": signal, "pid": 7, "error": error, "time_ns": 0}
        return self.worker(at, "exited", worker, rank=rank, **end)

    def world(
        self, at: float, size: int, joined: list[str] | None = None, left: list[str] | None = None, hosts: int = 1
    ) -> EventLines:
        self.generation += 1
        changes = {"joined": joined or [], "left": left or []}
        return self.add(at, "world_formed", size=size, hosts=hosts, root=0, synced=0, **changes)

    def resumed(self, at: float, downtime_s: float, ticks_lost: int = 0) -> EventLines:
        losses = {"commits_lost": 0, "ticks_lost": ticks_lost, "lower_bounds": []}
        return self.add(at, "training_resumed", downtime_s=downtime_s, **losses)

    def end(self, at: float, cause: str, tick: int | None = None) -> EventLines:
        return self.add(at, "end", cause=cause, at="now" if tick is None else tick)

    def replication(self, at: float, age_s: float | None, replicated: int, **fields: Any) -> EventLines:
        commit = None if age_s is None else [self.generation, int(at)]
        figures = {"failed": 0, "seconds": 0.5, "bytes": 3_000_000, "memory_bytes": 40_000_000, **fields}
        return self.add(at, "replication", commit=commit, age_s=age_s, replicated=replicated, **figures)

    def durable(self, at: float, commit: tuple[int, int], size: int, seconds: float) -> EventLines:
        figures = {"commit": list(commit), "bytes": size, "seconds": seconds, "failures": 0}
        return self.add(at, "durable_copy", state="saved", host="a", folder=f"copy-{at}", **figures)

    def not_durable(self, at: float, kind: str, reason: str) -> EventLines:
        where = {"host": "a", "folder": f"copy-{at}", "kind": kind}
        text = f"a durable copy could not be saved: {reason}; next attempt in 2 s"
        return self.add(at, "durable_copy", state="failed", **where, reason=text, failures=1)

    def finished(self, at: float, status: str = "succeeded", **fields: Any) -> EventLines:
        figures: dict[str, Any] = {"generations": self.generation, "failures": 1, "driver": 1, "downtime_s": 0.5}
        figures |= {"commits_lost": 0, "ticks_lost": 0, "lower_bounds": [], "goodput": 0.8}
        return self.add(at, "job_finished", status=status, **{**figures, **fields})


def killed_and_restarted(path: Path, job: str = "job-1", error: str = "", host: str = "a") -> EventLines:
    """Write the events of a job of two workers. The one of rank 1 is killed at 10 s, its successor joins at 13 s."""
    lines = EventLines(path, job).start().host(0.1, host, 2)
    for slot in (0, 1):
        lines.worker(0.2, "started", f"{host}:{slot}#1")
    for slot in (0, 1):
        lines.worker(1 + slot, "ready", f"{host}:{slot}#1")
    lines.world(2, 2, [f"{host}:0#1", f"{host}:1#1"])
    lines.exited(10, f"{host}:1#1", 1, signal=9, error=error).end(10, f"{host}:1#1 was killed by SIGKILL")
    lines.worker(10.2, "ready", f"{host}:0#1").world(10.2, 1, left=[f"{host}:1#1"]).resumed(10.5, 0.5, 3)
    lines.worker(11, "started", f"{host}:1#2").worker(12, "ready", f"{host}:1#2")
    lines.add(12, "hold", cause=f"{host}:1#2 joins").end(12.1, f"{host}:1#2 joins", 41)
    lines.worker(12.5, "ready", f"{host}:0#1").world(12.6, 2, [f"{host}:1#2"])
    lines.add(12.8, "sync", worker=f"{host}:1#2", bytes=1000, seconds=0.1).resumed(13, 0.5)
    for slot, incarnation in ((0, 1), (1, 2)):
        lines.exited(20, f"{host}:{slot}#{incarnation}", slot, code=0)
    return lines.finished(20.1)


def with_copies(path: Path, job: str = "job-1") -> EventLines:
    """Write the events of a sharded job that replicates, and saves durable copies."""
    lines = EventLines(path, job).start().host(0.1, "a", 1).host(0.1, "b", 1)
    lines.worker(0.2, "started", "a:0#1").worker(0.2, "started", "b:0#1")
    lines.worker(1, "ready", "a:0#1").worker(1, "ready", "b:0#1").world(2, 2, ["a:0#1", "b:0#1"], hosts=2)
    lines.durable(5, (1, 30), 90_000_000, 0.25).replication(13, 0.75, 12)
    for at in (15, 17):
        lines.not_durable(at, "full", f"No space left for /run/copy-{at}")
    lines.not_durable(19, "storage", "the process <b>was killed</b>")
    lines.replication(24, 4.0, 2, failed=2, seconds=2.0, reason="commit (1, 35) has not come")
    lines.durable(25, (1, 80), 90_000_000, 1.5)
    lines.replication(36, 0.5, 9, failed=1, bytes=1_000_000, reason="commit (1, 95) has not come")
    lines.exited(40, "a:0#1", 0, code=0).exited(40, "b:0#1", 1, code=0)
    return lines.finished(40.1, failures=0)


def big_job(path: Path, workers: int, worlds: int) -> Path:
    """Write the events of a job whose generations end by failures of one worker after the other."""
    names = [f"h{index // 8}:{index % 8}#1" for index in range(workers)]
    lines = EventLines(path).start(workers)
    rows: list[str] = []

    def add(time: float, event: str, /, **fields: Any) -> None:
        line = {"time": BEGAN + time, "event": event, "job": "job-1", "generation": lines.generation, **fields}
        rows.append(json.dumps(line) + "\n")

    def of_worker(at: float, event: str, name: str, **fields: Any) -> None:
        host, _, rest = name.rpartition(":")
        add(at, event, worker=name, host=host, slot=int(rest.partition("#")[0]), **fields)

    for name in names:
        of_worker(1, "worker_started", name)
    left: list[str] = []
    joined = list(names)
    for world in range(worlds):
        at = 100.0 * (world + 1)
        for name in names:
            of_worker(at, "worker_ready", name)
        lines.generation += 1
        add(at, "world_formed", size=workers, hosts=workers // 8, joined=joined, left=left, root=0, synced=0)
        if world:
            losses = {"commits_lost": 0, "ticks_lost": 1, "lower_bounds": []}
            add(at + 1, "training_resumed", downtime_s=2.0 + world % 5, **losses)
        victim = names[world % workers]
        host, _, rest = victim.rpartition(":")
        slot, _, incarnation = rest.partition("#")
        end = {"rank": 0, "exit_code": None, "signal": 9, "pid": 1, "error": "", "time_ns": 0}
        of_worker(at + 98, "worker_exited", victim, **end)
        add(at + 98, "end", cause=f"{victim} was killed by SIGKILL", at="now")
        names[world % workers] = f"{host}:{slot}#{int(incarnation) + 1}"
        of_worker(at + 98.5, "worker_started", names[world % workers])
        left, joined = [victim], [names[world % workers]]
    with open(path, "a") as file:
        file.writelines(rows)
    return path
