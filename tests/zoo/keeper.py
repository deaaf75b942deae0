"""Keeper: strikes a program at planned places, waits for worlds, and writes down what the program has trained.

All ranks of a program compute the same numbers from the same inputs, in worlds of one and of two workers. The mean of
two equal gradients is exact, so an undisturbed program and a disturbed one must end with the same bits.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

import elasticstate as elastic

STEPS = 40
FULL = 2  # workers of a whole world
DEVICE = os.environ.get("ZOO_DEVICE", "cpu")
"""Where programs make their tensors; cuda:0, on which the workers are on a host each, as for tests/gpu."""
_WAIT_S = 90.0


@dataclass(frozen=True)
class Strike:
    """A SIGKILL at a place of a program, in a whole world, when ``step`` is reached."""

    place: str
    step: int
    rank: int  # -1: all workers


@dataclass(frozen=True)
class Plan:
    """All that happens to one run of a program.

    ``every``: of ``state.commit``. ``leaves_at``, ``joins_at``: steps at which one worker leaves and comes back; 0:
    never.
    """

    every: int = 1
    strikes: tuple[Strike, ...] = ()
    leaves_at: int = 0
    joins_at: int = 0


class Keeper:
    """The keeper of one worker of a program. ``directory``: shared by all workers of the run."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.plan = plan
        self._directory = directory
        self._step = 0
        self._is_alone = not (directory / "hosts").exists()  # the undisturbed run, without elasticrun
        (directory / f"pid-{os.getpid()}").touch()

    # ------------------------------------------------------------------------------------------- what a program calls

    def goes_on(self, state: Any) -> bool:
        """Return True if the program must train another step. Wait for the world that the plan wants first."""
        self._step = state.step
        for number, strike in enumerate(self.plan.strikes):
            if self._is_due(strike.step, f"struck-{number}"):
                self._wait_for_world(state, FULL)
        if self.plan.leaves_at and self._is_due(self.plan.leaves_at, "left"):
            if self._is_due(self.plan.leaves_at, "leaving"):
                self._wait_for_world(state, FULL)
            self._write_hosts(1, "leaving")
            self._wait_for_world(state, 1)
            (self._directory / "left").touch()
        if self.plan.joins_at and self._is_due(self.plan.joins_at, "joined"):
            self._write_hosts(FULL, "joining")
            self._wait_for_world(state, FULL)
            (self._directory / "joined").touch()
        return bool(state.step < STEPS)

    def at(self, place: str) -> None:
        """Strike here, if the plan says so."""
        if self._is_alone or not elastic.world() or elastic.size() != FULL:
            return
        for number, strike in enumerate(self.plan.strikes):
            is_here = strike.place == place and self._step >= strike.step and strike.rank in (-1, elastic.rank())
            if is_here and not (self._directory / f"struck-{number}").exists():
                self._strike(number, strike)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, so that its backward pass goes through the place "backward"."""
        if not loss.requires_grad:
            return loss
        found: torch.Tensor = _Backward.apply(loss, self)  # type: ignore[no-untyped-call]
        return found

    def commit(self, state: Any) -> None:
        """End the step with a commit, if one is due."""
        self.at("before commit")
        state.commit(every=self.plan.every)
        self.at("after commit")

    @contextmanager
    def in_finally(self) -> Iterator[None]:
        """Pass the place "finally" when the block ends, also by an exception."""
        try:
            yield
        finally:
            self.at("finally")

    def finish(self, state: Any, omit: tuple[str, ...] = (), **more: Any) -> None:
        """Write down the values of the state, except those of ``omit``, and ``more``."""
        found = {name: _content(getattr(state, name)) for name in state._names if name not in omit}
        rank = 0 if self._is_alone else elastic.rank()
        torch.save({**found, **more}, self._directory / f"result-{rank}.pt")

    # --------------------------------------------------------------------------------------------------------- helpers

    def _is_due(self, step: int, name: str) -> bool:
        return not self._is_alone and self._step >= step and not (self._directory / name).exists()

    def _wait_for_world(self, state: Any, size: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        while elastic.size() != size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no world of {size} at step {self._step} after {_WAIT_S} s")
            time.sleep(0.002)
            state.check_host_updates()

    def _write_hosts(self, slots: int, why: str) -> None:
        (self._directory / why).touch()
        fresh = self._directory / f"hosts-{os.getpid()}"
        fresh.write_text(hosts(slots))
        fresh.replace(self._directory / "hosts")

    def _strike(self, number: int, strike: Strike) -> None:
        with suppress(FileExistsError):
            os.close(os.open(self._directory / f"struck-{number}", os.O_CREAT | os.O_EXCL))
            victims = [os.getpid()]
            if strike.rank < 0:
                pids = (int(path.name.removeprefix("pid-")) for path in self._directory.glob("pid-*"))
                victims = [pid for pid in pids if pid != os.getpid() and _is_sibling(pid)] + victims
            for pid in victims:
                os.kill(pid, signal.SIGKILL)


class _Backward(torch.autograd.Function):
    """The identity, whose backward pass a keeper may strike."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, keeper: Keeper) -> torch.Tensor:
        ctx.keeper = keeper
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.keeper.at("backward")
        return gradients[0], None


def _is_sibling(pid: int) -> bool:
    """Return True if the process lives and is a worker of this job."""
    with suppress(OSError):
        mine, other = (Path(f"/proc/{p}/environ").read_bytes().split(b"\0") for p in ("self", pid))
        return any(entry.startswith(b"ELASTICSTATE_TEST_RUN=") and entry in mine for entry in other)
    return False


def _content(value: Any) -> Any:
    """Return what is compared of a value: contents, modes, and which parameters are trained."""
    if isinstance(value, torch.nn.Module):
        return {
            "state": value.state_dict(),
            "modes": {name: part.training for name, part in value.named_modules()},
            "trained": {name: parameter.requires_grad for name, parameter in value.named_parameters()},
        }
    if isinstance(value, torch.Tensor):
        return {"value": value.detach().clone(), "trained": value.requires_grad}
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__ == "__main__":
        return {key: _content(part) for key, part in vars(value).items()}
    return list(value) if isinstance(value, collections.deque) else value


def hosts(slots: int) -> str:
    """Return what a discovery script prints."""
    if DEVICE == "cpu":
        return f"localhost:{slots}\n"
    return "".join(f"127.0.0.{number + 2}:1\n" for number in range(slots))


def write_plan(path: Path, plan: Plan) -> None:
    path.write_bytes(msgspec.json.encode(plan))


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)
