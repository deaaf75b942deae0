"""A real job of one rank per local host, all on one device, and the faults that check_gpu.py makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kit.job import Hosts, Job, Line

TRAIN = Path(__file__).with_name("train.py")
STEPS_BETWEEN = 3  # that each member of a full world has made before the next fault
OPTIONS = (
    *("--join-window", "0.5", "--min-interrupt-distance", "0.5", "--reset-limit", "1000"),
    *("--heartbeat-timeout", "3", "--stop-timeout", "5", "--regroup-timeout", "30", "--cooldown-range", "0.2", "1"),
    *("--start-timeout", "60", "--elastic-timeout", "60", "--collective-timeout", "10"),
)


class Training:
    """The job. ``strike()`` makes one fault, waits until the world is full again, and returns what was measured."""

    def __init__(
        self, folder: Path, backend: str, size: int, *script: str, patience_s: float, within: tuple[str, ...]
    ) -> None:
        """``patience_s``: longest wait for the next step after a fault, and then for the full world.

        ``within``: as of :class:`Job`.
        """
        folder.mkdir(parents=True)
        self.size = size
        self._patience_s = patience_s
        self._folder = folder
        # 127.0.0.2 and on: one slot for each host, so that each rank's device is the first one
        self._names = [f"127.0.0.{number + 2}:1" for number in range(size)]
        self._hosts = Hosts(folder).set(*self._names)
        sizes = ("-np", str(size), "--min-np", "1", "--max-np", str(size))
        options = (*sizes, "--backend", backend, *OPTIONS, *self._hosts.options)
        command = [sys.executable, str(TRAIN), "--folder", str(folder), *script]
        self.job = Job(folder, *options, command=command, within=within)
        self.changed_processes: list[str] = []
        """Survivors that did not keep their process."""

    def __enter__(self) -> Training:
        self.job.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.job.__exit__(kind, error, trace)

    def members(self) -> dict[int, Line]:
        """Return the members of the newest world by process, once all of them train; else nothing."""
        entered = self.job.log("enter")
        newest = max((line["generation"] for line in entered), default=0)
        found = {line["pid"]: line for line in entered if line["generation"] == newest}
        return found if found and len(found) == next(iter(found.values()))["size"] else {}

    def wait_until_full(self) -> dict[int, Line]:
        """Wait until all ranks are in one world, and have made some steps there."""

        def full() -> dict[int, Line]:
            members = self.members()
            if len(members) < self.size:
                return {}
            generation = next(iter(members.values()))["generation"]
            steps = [line["pid"] for line in self.job.log("step") if line["generation"] == generation]
            return members if all(steps.count(pid) >= STEPS_BETWEEN for pid in members) else {}

        found: dict[int, Line] = self._wait_for(f"world of {self.size} that trains", full)
        return found

    def strike(self, kind: str, turn: int) -> float:
        """Make a fault in the full world. Return the milliseconds to the next step of the last survivor.

        ``kind``: kill, stop, assert, stay (away from a collective for too long), or leave (with a join afterwards).
        ``turn`` chooses the rank.
        """
        members = self.wait_until_full()
        generation = next(iter(members.values()))["generation"]
        by_rank = {line["rank"]: pid for pid, line in members.items()}
        victim = by_rank[turn % self.size]
        struck_ns = time.monotonic_ns()
        if kind == "leave":
            taken = self._name_of(victim)
            self._hosts.set(*(name for name in self._names if name != taken))
        elif kind in ("assert", "stay"):
            (self._folder / f"{kind}-{victim}").touch()
        else:
            os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        survivors = members.keys() - ({victim} if kind != "stay" else set())

        def next_world() -> list[Line]:
            """Return the first step of each member of the next world."""
            entered = [line for line in self.job.log("enter") if line["generation"] > generation]
            first = min((line["generation"] for line in entered), default=0)
            size = next((line["size"] for line in entered if line["generation"] == first), 0)
            steps: dict[int, Line] = {}
            for line in self.job.log("step"):
                if line["generation"] == first and size:
                    steps.setdefault(line["pid"], line)
            return [*steps.values()] if steps and len(steps) == size else []

        steps = self._wait_for(f"step after a {kind}", next_world)
        if kind in ("assert", "stay"):
            struck_ns = next(line["ns"] for line in self.job.log(kind) if line["pid"] == victim)
        if kind == "stay" and "taken longer than --collective-timeout" not in self.job.output:
            self.changed_processes.append("nobody has found the collective that hangs")
        after = {line["pid"] for line in steps}
        if kind == "leave":
            self._hosts.set(*self._names)
        self.wait_until_full()
        after |= self.members().keys()
        for pid in sorted(survivors - after):
            self.changed_processes.append(f"process {pid}, rank {members[pid]['rank']}, after a {kind}")
        if victim in after and kind != "stay":
            self.changed_processes.append(f"process {victim} lives on after a {kind}")
        return max(line["ns"] for line in steps) / 1e6 - struck_ns / 1e6

    def finish(self) -> tuple[int, set[str]]:
        """End the job. Return the number of steps, and the digests of all members, which must be one."""
        (self._folder / "stop").touch()
        self.job.finish(0, self._patience_s)
        self.job.check_survival()
        finals = self.job.log("final")
        return max(line["step"] for line in finals), {line["digest"] for line in finals}

    def _name_of(self, pid: int) -> str:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        worker = next(v for v in variables if v.startswith(b"ELASTICSTATE_WORKER=")).decode()
        return next(name for name in self._names if f"={name.partition(':')[0]}:" in worker)

    def _wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        return self.job.wait_for(what, condition, self._patience_s)


class Restarted:
    """The same training under torchrun, which restarts all workers after a failure."""

    def __init__(self, folder: Path, backend: str, size: int, *script: str, patience_s: float) -> None:
        (folder / "logs").mkdir(parents=True)
        self._folder, self._size, self._patience_s = folder, size, patience_s
        self._output = folder / "output.txt"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "9"]
        train = [str(TRAIN), "--folder", str(folder), "--restarted", backend, *script]
        # Without the variable, a restart with Gloo reads the addresses of the last attempt, and hangs.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *torchrun, "--nproc-per-node", str(size), *train],
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Restarted:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()

    def strike(self, turn: int) -> float:
        """Kill a rank that has made some steps. Return the milliseconds to the next step of the last rank."""
        steps = self._wait_for("steps of all ranks", lambda: self._steps_of_newest(STEPS_BETWEEN))
        generation, victim = steps[0]["generation"], steps[turn % self._size]["pid"]
        struck_ns = time.monotonic_ns()
        os.kill(victim, signal.SIGKILL)

        def next_steps() -> list[Line]:
            found = self._steps_of_newest(1)
            return found if found and found[0]["generation"] > generation else []

        return float(max(line["ns"] for line in self._wait_for("step after the restart", next_steps)) - struck_ns) / 1e6

    def _steps_of_newest(self, count: int) -> list[Line]:
        """Return a step of each rank since the newest restart: the first one after ``count``; none if one has fewer."""
        lines = [json.loads(line) for path in self._folder.glob("logs/*") for line in path.read_text().split("\n")[:-1]]
        newest = max((line["generation"] for line in lines), default=0)
        steps = [line for line in lines if line["what"] == "step" and line["generation"] == newest]
        by_rank = [[line for line in steps if line["rank"] == rank] for rank in range(self._size)]
        return [made[count - 1] for made in by_rank] if all(len(made) >= count for made in by_rank) else []

    def _wait_for(self, what: str, condition: Callable[[], list[Line]]) -> list[Line]:
        deadline = time.monotonic() + self._patience_s
        while not (found := condition()):
            if time.monotonic() > deadline or self._process.poll() is not None:
                status = self._process.poll()
                raise AssertionError(f"no {what} within {self._patience_s} s; status {status}:\n{self.tail()}")
            time.sleep(0.01)
        return found

    def tail(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]
