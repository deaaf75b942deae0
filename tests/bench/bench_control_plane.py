"""The control plane at scale: the real driver with up to 1,250 simulated agents of 8 workers each.

The driver is a plain ``elasticrun --listen``. The agents run in a few processes, use the real protocol over real TLS
connections, and answer for workers that do not exist: READY when all workers have been requested, an answer to each
hold, READY again after each END, stamps as often as real agents. For each size, on an otherwise idle machine:

- world: from the last READY sent to the last WORLD received
- hold: from the first HOLD received to the last END(at K) received, which follows the last answer
- end: from the abrupt end of one agent's connection to the last END(now) received
- next world: from the same moment to the last WORLD of the next generation received
- rest: CPU time of the driver, in % of one core, while agents send only stamps (of workers that make ticks and commits,
  with digests of these) and heartbeats; and the driver's memory at the end
- watched: the same, while one page of the dashboard is open (its stream of events is read); medians of ROUNDS times by
  turns, and the ratio of each time to the one before: its median, least and most
- scrape: CPU time of the driver for one answer with metrics, beyond that at rest

The CPU time of the driver is also measured, because it does not depend on other load on the machine: for the first
world (world cpu), from the newcomer's first READY to the second world (join cpu), from the death to the third (death
cpu). All runs on this one machine: agents and driver share its cores. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from watching import cpu_s, page, scrape

from elasticstate.agent.supervisor import stamps_interval_s
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import digests_interval_s
from elasticstate.net import messages
from elasticstate.net.control import Stream
from elasticstate.net.trust import NAME, Trust

SLOTS = 8
PROCESSES = 2
TIMEOUT_S = 120.0
REST_S = 4.0  # two of the page's changes
ROUNDS = 7
SCRAPES = 50
GOALS = {"world": 1.0, "hold": 1.0, "end": 0.5, "next world": 1.0}


class End(Stream):
    """The connection of a simulated agent."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    def received(self, data: bytes) -> None:
        self._agent.received(data)


class Agent:
    """Simulated agent of one host: a connection, and the messages of its workers."""

    def __init__(self, part: Part, host: str) -> None:
        self.part = part
        self.host = host
        self.workers: list[WorkerId] = []
        self.generation = 0
        self.tick = 0
        self.trains = False
        self.stamps_interval_s = 1.0
        self.size, self.digest_at = 0, 0.0

    async def dial(self, port: int, trust: Trust) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, self.stream = await loop.create_connection(
                    lambda: End(self),
                    *("127.0.0.1", port),
                    ssl=trust.client,
                    server_hostname=NAME,
                )
                break
            except OSError:  # refused, because too many dial at once: a real agent retries, too
                await asyncio.sleep(0.1)
        self.send(messages.AgentHello(self.host, self.host, SLOTS, 0, os.getpid(), messages.PROTOCOL_VERSION, "bench"))

    def send(self, message: Any) -> None:
        self.stream.send(message)

    def say(self, worker: WorkerId, body: messages.FromWorkerBody) -> None:
        self.send(messages.FromWorker(worker, body))

    def received(self, data: bytes) -> None:
        order = messages.decode_to_agent(data)
        match order:
            case messages.JobSpec():
                self.timeout_s = order.options.heartbeat_timeout_s
                self.send(messages.HostReport((), ()))
            case messages.StartWorker(worker):
                self.workers.append(worker)
                self.send(messages.Started(worker, 1))
                self.part.count("spawned")
            case messages.World():
                self.generation, self.tick, self.trains, self.size = order.generation, 1, True, order.size
                self.stamps_interval_s = stamps_interval_s(self.timeout_s, order.size)
                self.part.count(f"world {self.generation}", len(order.members))
                if order.rank == 0:
                    self.say(order.placement.worker, messages.First(self.generation))
            case messages.ToWorkers(_, body):
                self.told(body)
            case messages.Shutdown():
                self.stream.finish()

    def told(self, body: messages.ToWorkerBody) -> None:
        match body:
            case messages.Hold(generation, number):
                self.trains = False
                self.part.count("hold")
                for worker in self.workers:
                    self.say(worker, messages.HoldAnswer(generation, self.tick, False, number))
            case messages.End(generation, tick, _) if generation == self.generation:
                self.part.count("end now" if tick is None else "end at")
                self.tick, self.trains = tick or self.tick, False
                self.ready()
            case messages.Leave():
                pass

    def ready(self) -> None:
        commit = CommitId(self.generation, 1) if self.generation else None  # sealed by all workers
        for worker in self.workers:
            self.say(worker, messages.Ready(self.generation, commit, None, f"{self.host}:1", self.tick, 0.0))

    def stamps(self) -> None:
        if self.trains:
            self.tick += 1
        place = messages.Place.TRAIN if self.generation else messages.Place.REGROUP
        commit = CommitId(self.generation, self.tick) if self.generation else None
        is_due = self.trains and time.monotonic() > self.digest_at + digests_interval_s(self.size) / 2  # the most often
        digests = ((0, self.tick, self.tick),) if is_due else ()
        if is_due:
            self.digest_at = time.monotonic()
        stamp = messages.Stamp(place, self.generation, self.tick, commit, digests=digests)
        self.send(messages.Stamps(tuple((worker, stamp) for worker in self.workers)))


class Part:
    """Group of agents in one process. Reads commands from its stdin, and reports counts and times of events."""

    def __init__(self, port: int, token: str, first: int, count: int) -> None:
        self.port = port
        self.trust = Trust(token)
        self.agents = [Agent(self, f"host{number}") for number in range(first, first + count)]
        self.counts: dict[str, list[float]] = {}  # event -> count, first time, last time

    def count(self, what: str, times: int = 1) -> None:
        now = time.time()
        entry = self.counts.setdefault(what, [0, now, now])
        entry[0] += times
        entry[2] = now

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await asyncio.gather(*(agent.dial(self.port, self.trust) for agent in self.agents))
        stamping = asyncio.ensure_future(self._stamp())
        while line := (await reader.readline()).decode().strip():
            if line == "ready":
                for agent in self.agents:
                    agent.ready()
                    await asyncio.sleep(0)
                self.count("ready sent")
            elif line == "die":
                self.count("died")
                self.agents.pop().stream.abort("bench")
            elif line == "forget":
                self.counts.clear()
            print(json.dumps(self.counts), flush=True)
        stamping.cancel()

    async def _stamp(self) -> None:
        at = time.monotonic()
        while self.agents:
            for agent in list(self.agents):
                agent.stamps()
                at += agent.stamps_interval_s / max(1, len(self.agents))
                await asyncio.sleep(max(0.0, at - time.monotonic()))


class Bench:
    """The driver and the processes with agents, for one size."""

    def __init__(self, hosts: int, folder: Path) -> None:
        self.hosts = hosts
        self.port, self.page_port, self.metrics_port = free_ports(3)
        token = folder / "token"
        options = (
            "-np",
            str(hosts * SLOTS),
            "--min-np",
            str(hosts * SLOTS),
            "--listen",
            f"127.0.0.1:{self.port}",
            "--token-file",
            token,
            "--dashboard",
            self.page_port,
            "--metrics",
            self.metrics_port,
        )
        quick = ("--min-interrupt-distance", "0", "--cooldown-range", "1000", "1000")
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "elasticstate", *map(str, options), *quick, "unused"], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not token.exists() or not self._listens():
            assert time.monotonic() < deadline, "the driver does not listen"
            time.sleep(0.01)
        self.token = token.read_text().strip()
        share = -(-hosts // PROCESSES)
        self.parts = [self._part(i, min(share, hosts - i)) for i in range(0, hosts, share)]

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    def _part(self, first: int, count: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            __file__,
            f"--part={self.port},{self.token},{first},{count}",
        ]  # tokens may begin with a dash
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, word: str, *parts: subprocess.Popen[str]) -> dict[str, list[float]]:
        """Send a command to these processes (default: all). Return the merged counts of all: [count, first, last]."""
        merged: dict[str, list[float]] = {}
        for part in self.parts:
            assert part.stdin is not None
            assert part.stdout is not None
            part.stdin.write((word if not parts or part in parts else "look") + "\n")
            part.stdin.flush()
        for part in self.parts:
            assert part.stdout is not None
            for what, (times, first, last) in json.loads(part.stdout.readline()).items():
                before = merged.get(what, [0, first, last])
                merged[what] = [before[0] + times, min(before[1], first), max(before[2], last)]
        return merged

    def until(self, what: str, condition: Callable[[dict[str, list[float]]], bool]) -> dict[str, list[float]]:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(counts := self.tell("look")):
            assert time.monotonic() < deadline, f"{what} has not come: {counts}"
            time.sleep(0.05)
        return counts

    def cpu_s(self) -> float:
        """Return the CPU time that the driver has used so far."""
        return cpu_s(self.driver.pid)

    def measure(self) -> dict[str, Any]:
        workers = self.hosts * SLOTS
        self.until("the order to start", lambda c: c.get("spawned", [0])[0] == workers)
        before = self.cpu_s()
        self.tell("ready")
        counts = self.until("world 1", lambda c: c.get("world 1", [0])[0] == workers)
        found: dict[str, Any] = {
            "world": counts["world 1"][2] - counts["ready sent"][2],
            "world cpu": self.cpu_s() - before,
        }

        turns = [(self.share(), self.watched_share()) for _ in range(ROUNDS)]
        found["rest"], found["watched"] = (median(shares) * 100 for shares in zip(*turns, strict=True))
        found["ratios"] = sorted(watched / rest for rest, watched in turns)
        found["scrape"] = self.scrape_s(found["rest"] / 100)

        newcomer = self._part(self.hosts, 1)
        self.parts.append(newcomer)
        self.until("the order to start", lambda c: c["spawned"][0] == workers + SLOTS)
        before = self.cpu_s()
        self.tell("ready", newcomer)
        workers += SLOTS
        counts = self.until("world 2", lambda c: c.get("world 2", [0])[0] == workers)
        found["hold"] = counts["end at"][2] - counts["hold"][1]
        found["join cpu"] = self.cpu_s() - before

        before = self.cpu_s()
        self.tell("die", newcomer)
        counts = self.until("world 3", lambda c: c.get("world 3", [0])[0] == workers - SLOTS)
        found["end"] = counts["end now"][2] - counts["died"][1]
        found["next world"] = counts["world 3"][2] - counts["died"][1]
        found["death cpu"] = self.cpu_s() - before
        found["MB"] = psutil.Process(self.driver.pid).memory_info().rss / 1e6
        return found

    def share(self) -> float:
        """Return the share of one core that the driver uses."""
        before, begun = self.cpu_s(), time.monotonic()
        time.sleep(REST_S)
        return (self.cpu_s() - before) / (time.monotonic() - begun)

    def watched_share(self) -> float:
        """Return the same while a page is open."""
        with page(self.page_port) as sizes:
            found = self.share()
            assert len(sizes) > 1, "the page got no changes"
        return found

    def scrape_s(self, rest: float) -> float:
        """Return the CPU time of one scrape. ``rest``: share of a core that the driver uses at rest."""
        before, begun = self.cpu_s(), time.monotonic()
        for _ in range(SCRAPES):
            scrape(self.metrics_port)
        return (self.cpu_s() - before - rest * (time.monotonic() - begun)) / SCRAPES

    def close(self) -> None:
        self.driver.terminate()
        for part in self.parts:
            assert part.stdin is not None
            part.stdin.close()
            part.wait(TIMEOUT_S)
        self.driver.wait(TIMEOUT_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 12, 125, 1250])
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        port, token, first, count = args.part.split(",")
        gc.disable()  # only the driver is measured
        asyncio.run(Part(int(port), token, int(first), int(count)).run())
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    names = ("world", "world cpu", "hold", "join cpu", "end", "next world", "death cpu")
    print(
        "| workers | "
        + " | ".join(f"{name}, ms" for name in names)
        + " | at rest, % of a core | watched, % | watched / at rest | scrape, ms | driver, MB |"
    )
    print("|---|" + "---|" * (len(names) + 5))
    for hosts in args.hosts:
        with tempfile.TemporaryDirectory(prefix="elasticstate-bench-") as folder:
            bench = Bench(hosts, Path(folder))
            try:
                found = bench.measure()
            finally:
                bench.close()
        figures = " | ".join(f"{found[name] * 1e3:.0f}" for name in names)
        least, *_, most = found["ratios"]
        ratio = f"{median(found['ratios']):.2f} ({least:.2f} to {most:.2f})"
        shares = f"{found['rest']:.2f} | {found['watched']:.2f} | {ratio} | {found['scrape'] * 1e3:.2f}"
        print(f"| {hosts * SLOTS} | {figures} | {shares} | {found['MB']:.0f} |", flush=True)
    goals = (f"{GOALS[name] * 1e3:.0f}" if name in GOALS else "" for name in names)
    print("| goal | " + " | ".join(goals) + " | 10 | at rest + 10 |  | 10 | 500 |")


if __name__ == "__main__":
    main()
