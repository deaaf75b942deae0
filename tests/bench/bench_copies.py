"""Throughput of copies of commits, measured alternately with a raw TCP stream between the same two processes.

The raw stream is the fastest that two processes can do: the sender sends from memory that is in use, the receiver
throws the bytes away. Replication reserves a file, receives, verifies and publishes a copy. A read ends in memory of
the reader, with a checksum at both ends; the first read of a buffer verifies the whole buffer, too.

Figures are medians over the rounds of the ratio to the raw stream of the same round, by elapsed time and by the CPU
time of both processes, which other load on the machine changes less. Prints markdown. Exits with 1 if the goal is
missed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from elasticstate.core.ids import CommitId, SlotId  # noqa: E402
from elasticstate.core.types import CopyOf  # noqa: E402
from elasticstate.replicas.client import ReplicaClient  # noqa: E402
from elasticstate.replicas.pusher import Target  # noqa: E402
from tests.kit.commits import KEY, Host  # noqa: E402

MB = 1 << 20
PIECE = MB
GOAL = 0.6  # of the raw stream, for replication
REPLICATION = "replication"
WARM_UP = 3  # rounds in which the stores get the files that they use again later


def target(directory: str, source: str, size: int) -> None:
    """Be the other process: keep copies, receive raw streams, and read copies, one command per line of stdin."""
    listener = socket.create_server(("127.0.0.1", 0))
    slot = SlotId("source", 0)
    target = bytearray(size)
    piece = memoryview(bytearray(PIECE))
    with Host("target", Path(directory)) as host, closing(ReplicaClient({"source": source}, KEY, 60.0)) as client:
        print(host.address, listener.getsockname()[1], flush=True)
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "kept":
                assert host.report() == ("kept", slot, CommitId(1, int(numbers[0]))), host.log
            elif command == "raw":
                connection, _ = listener.accept()
                with connection:
                    while connection.recv_into(piece, PIECE, socket.MSG_WAITALL):
                        pass
            elif command == "read":
                begin = time.perf_counter()
                copy = CopyOf("source", slot, CommitId(1, int(numbers[0])))
                client.read_into(copy, [(4096, memoryview(target))])
                print(time.perf_counter() - begin, time.process_time(), flush=True)
                continue
            elif command == "forget":
                host.copies.store.forget(CommitId(1, int(numbers[0])))
            print("done", time.process_time(), flush=True)


class Measurement:
    """One run: a source in this process, and the target in a child."""

    def __init__(self, directory: str, size: int) -> None:
        self.size = size
        self.host = Host("source", Path(directory))
        self.worker = self.host.worker()
        self.tensors = os.urandom(size)
        arguments = [sys.executable, __file__, "--target", directory, self.host.address, str(size)]
        self.child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        address, port = self._line().split()
        self.target, self.raw_port = Target("target", address), int(port)
        self.child_cpu = 0.0  # CPU seconds of the child until its last answer

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        assert self.child.wait(60) == 0
        self.host.close()

    def _line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def ask(self, command: str) -> str:
        """Send a command, and return the first word of the answer."""
        assert self.child.stdin is not None
        self.child.stdin.write(command + "\n")
        self.child.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        answer, cpu = self._line().split()
        self.child_cpu = float(cpu)
        return answer

    def measure(self, step: Callable[[], float]) -> tuple[float, float]:
        """Return the seconds that a step took, and the CPU seconds of both processes."""
        before = time.process_time() + self.child_cpu
        seconds = step()
        return seconds, time.process_time() + self.child_cpu - before

    def raw(self) -> float:
        """Send the bytes as they are. Return the seconds."""
        assert self.child.stdin is not None
        memory = memoryview(self.tensors)
        self.child.stdin.write("raw\n")
        self.child.stdin.flush()
        with socket.create_connection(("127.0.0.1", self.raw_port)) as connection:
            begin = time.perf_counter()
            for at in range(0, self.size, PIECE):
                connection.sendall(memory[at : at + PIECE])
            connection.shutdown(socket.SHUT_WR)
            assert self._answer() == "done"
            return time.perf_counter() - begin

    def keep(self, number: int) -> float:
        """Keep a copy on the own host. Return the seconds."""
        begin = time.perf_counter()
        self.host.copies.replicate(CommitId(1, number), {0: []})
        assert self.host.report()[0] == "kept", self.host.log
        return time.perf_counter() - begin

    def push(self, number: int) -> float:
        """Send the copy to the other process. Return the seconds until that process has verified it."""
        begin = time.perf_counter()
        self.host.copies.replicate(CommitId(1, number), {0: [self.target]})
        assert self.ask(f"kept {number}") == "done", self.host.log
        taken = time.perf_counter() - begin
        assert self.host.report()[0] == "kept", self.host.log
        return taken

    def read(self, number: int) -> float:
        return float(self.ask(f"read {number}"))


def measure(megabytes: int, rounds: int) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Return the ratios of elapsed time and of CPU time by way and round, and the seconds of the raw streams."""
    found: dict[str, list[tuple[float, float]]] = {}
    raws: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-copies-") as directory:
        run = Measurement(directory, megabytes * MB)
        try:
            for number in range(1, rounds + WARM_UP + 1):
                run.worker.commit(CommitId(1, number), run.tensors)
                steps: dict[str, Callable[[], float]] = {
                    "first read of a buffer": partial(run.read, number),
                    "read of a verified buffer": partial(run.read, number),
                    "own copy": partial(run.keep, number),
                    REPLICATION: partial(run.push, number),
                }
                for name, step in steps.items():
                    before, taken, after = (run.measure(what) for what in (run.raw, step, run.raw))
                    if number > WARM_UP:
                        ratios = tuple((b + a) / 2 / t for b, t, a in zip(before, taken, after, strict=True))
                        found.setdefault(name, []).append((ratios[0], ratios[1]))
                        raws += [before[0], after[0]]
                run.host.copies.store.forget(CommitId(1, number))
                run.ask(f"forget {number}")
        finally:
            run.close()
    return found, raws


def report(megabytes: int, rounds: int, found: dict[str, list[tuple[float, float]]], raws: list[float]) -> bool:
    """Print a table. Return True if the goal is met."""
    print(f"{megabytes} MB, {rounds} rounds; raw stream: {megabytes / 1024 / median(raws):.2f} GB/s\n")
    print("| | throughput / raw stream | lowest to highest | CPU time of the raw stream / its CPU time |")
    print("| - | - | - | - |")
    for name, ratios in found.items():
        times, costs = zip(*ratios, strict=True)
        print(f"| {name} | {median(times):.2f} | {min(times):.2f} to {max(times):.2f} | {median(costs):.2f} |")
    return median(time for time, _ in found[REPLICATION]) >= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        target(options.target[0], options.target[1], int(options.target[2]))
        return 0
    is_met = report(options.megabytes, options.rounds, *measure(options.megabytes, options.rounds))
    print(f"\n- replication, goal ≥ {GOAL}: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
