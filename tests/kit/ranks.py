"""Processes that are ranks of one store. They read commands from stdin, and answer with lines of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.kit.forks import SCRIPTS, Forked, Template

SOON_S = float(os.environ.get("RANKS_SOON_S", "30"))  # a wait that is not cut takes 120 s, or five times as long
Asked = Callable[[Any], None]


class Rank:
    """A process that makes groups on command. ``asked`` is called with each question that it asks in between."""

    def __init__(self, process: Forked, stdin: int, stdout: int, all_ranks: list[Rank], asked: Asked | None) -> None:
        self.process = process
        self.stdin = open(stdin, "wb", buffering=0)  # noqa: SIM115 - closed by end()
        self.stdout = open(stdout, "rb", buffering=0)  # noqa: SIM115
        self._all = all_ranks
        self._asked = asked
        self._heard = b""
        self._lines: list[dict[str, Any]] = []
        self.is_over = False

    def tell(self, command: str) -> None:
        self.stdin.write(f"{command}\n".encode())

    def hear(self, key: str, within_s: float = SOON_S) -> dict[str, Any]:
        """Return the next line that has this key. Meanwhile, answer the questions of the other processes."""
        deadline = time.monotonic() + within_s
        while True:
            while self._lines:
                if key in (line := self._lines.pop(0)):
                    return line
            left = deadline - time.monotonic()
            waiting = {rank.stdout: rank for rank in self._all if not rank.is_over}
            ready = select.select(list(waiting), [], [], max(0.0, left))[0]
            if not ready:
                self._show_stacks()
                raise AssertionError(f"no {key!r} from process {self.process.pid} within {within_s} s")
            for pipe in ready:
                waiting[pipe]._read()
            assert not self.is_over or self._lines, f"process {self.process.pid} ended with {self.process.wait()}"

    def _show_stacks(self) -> None:
        """Let all ranks print where their threads are."""
        for rank in self._all:
            if not rank.is_over:
                rank.process.send_signal(signal.SIGUSR1)
                select.select([rank.stdout], [], [], 1.0)

    def _read(self) -> None:
        heard = self.stdout.read(65536)
        self.is_over = not heard
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in map(json.loads, lines):
            if self._asked is not None and "asks" in line:
                self._asked(line["asks"])
            else:
                self._lines.append(line)

    def begin(self, command: str) -> None:
        self.tell(command)
        self.hear("began")

    def do(self, command: str, within_s: float = SOON_S) -> dict[str, Any]:
        self.tell(command)
        return self.hear("done", within_s)

    def end(self) -> None:
        self.is_over = True
        self.process.kill()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


class Ranks:
    """Ranks of one script. ``arguments``: arguments of the script; STORE is replaced by the port of the store."""

    def __init__(self, template: Template, script: str, *arguments: str, asked: Asked | None = None) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.all: list[Rank] = []
        self._template = template
        words = [str(self.store.port) if word == "STORE" else word for word in arguments]
        self._command = [SCRIPTS / script, *words]
        self._asked = asked

    def boot(self, count: int) -> list[Rank]:
        fresh = [self._start() for _ in range(count)]
        self.all += fresh
        for rank in fresh:
            rank.hear("booted", 4 * SOON_S)
        return fresh

    def _start(self) -> Rank:
        stdin, own_stdin = os.pipe()
        own_stdout, stdout = os.pipe()
        process = self._template.fork(self._command, descriptors=(stdin, stdout, 2))
        os.close(stdin)
        os.close(stdout)
        return Rank(process, own_stdin, own_stdout, self.all, self._asked)

    def create(self, name: str, members: list[Rank], *more: object) -> None:
        for number, rank in enumerate(members):
            rank.begin(" ".join(map(str, ["create", name, number, len(members), *more])))
        for rank in members:
            assert rank.hear("done")["error"] is None

    def wait_for_keys(self, count: int) -> None:
        deadline = time.monotonic() + SOON_S
        while self.store.num_keys() < count:
            assert time.monotonic() < deadline, f"{self.store.num_keys()} of {count} addresses published"
            time.sleep(0.005)

    def end(self) -> None:
        for rank in self.all:
            rank.end()
        del self.store  # with its connection
