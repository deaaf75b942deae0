"""Random programs of ticks, writes and failures: a tick record gives exactly the state of the tick, or none.

A program trains a model and writes the state in all ways, also in those that torch does not count: before a tick, and
between the last tick and the failure. The oracle keeps a full copy of the state at each tick. After the failure, the
worker restores either exactly the copy of the last tick, or the one of the last commit.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticstate import TorchState
from elasticstate.core.ids import CommitId
from elasticstate.state.base import committer_of
from elasticstate.state.values import flatten
from tests.kit.simulation.schedules import some_of
from tests.kit.state import Member, World

DEVIOUS = 0.35  # share of the programs whose writes between tick and failure are of all kinds
AGAIN = 0.2  # share of those that write back what was there before the tick


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.zeros(300, 300))  # large: constant
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layers(x)


def optimizers_for(pick: Random, model: Model) -> list[torch.optim.Optimizer]:
    first, last = model.layers[0].parameters(), [*model.layers[1].parameters(), *model.layers[3].parameters()]
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "plain": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
        "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    }
    return [kinds[pick.choice(list(kinds))](list(first)), kinds[pick.choice(list(kinds))](last)]


class Program:
    """One program, and its oracle."""

    def __init__(self, seed: int) -> None:
        self.pick = Random(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = Model()
        self.memory = np.zeros(70_000)
        self.weights = np.full((2, 8), 0.5, np.float32)
        if self.pick.random() < 0.3:
            self.model.layers[3].weight = nn.Parameter(torch.from_numpy(self.weights))
        self.earlier = torch.from_dlpack(self.parameter_of_model().detach())
        first, second = optimizers_for(self.pick, self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(first, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.state = TorchState(
            model=self.model, first=first, second=second, schedule=self.schedule, scaler=scaler, step=0,
            average=torch.zeros(70_000), small=torch.zeros(5), array=np.zeros(4), notes=[0],
            foreign=torch.from_numpy(self.memory),
        )  # fmt: skip
        self.member = Member(World(2), records_ticks=True)
        self.committer = committer_of(self.state)
        self.committer.use_session(self.member)
        self.other = TorchState(model=self.model)  # another state with the same model, which the script restores itself
        self.other.save()
        self.oracle: dict[CommitId | None, list[bytes]] = {}
        self.handles: list[torch.Tensor] = []
        self.struck = ""

    # -------------------------------------------------------------------------------------------------- operations

    def parameter(self) -> nn.Parameter:
        return self.pick.choice([*self.model.parameters(), self.state.average, self.model.table, self.model.seen])

    def parameter_of_model(self) -> nn.Parameter:
        return self.pick.choice(list(self.model.parameters()))

    def forward(self) -> None:
        self.loss().backward()

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 6)).square().mean()

    def optimize(self) -> None:
        for optimizer in (self.state.first, self.state.second):
            optimizer.step(self.closure)

    def closure(self) -> torch.Tensor:
        for optimizer in (self.state.first, self.state.second):
            optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def partly_optimize(self) -> None:
        """Fail inside a step, before or after its first writes."""

        def closure() -> torch.Tensor:
            if self.pick.random() < 0.5:
                raise RuntimeError("Connection closed by peer")
            return self.closure()

        with suppress(RuntimeError):
            self.state.first.step(closure)
        if self.pick.random() < 0.3:
            self.state.second.step(self.closure)

    def schedule_step(self) -> None:
        self.schedule.step()

    def learning_rate(self) -> None:
        for group in self.state.second.param_groups:
            group["lr"] *= 0.5

    def values(self) -> None:
        self.state.step += 1
        self.state.notes.append(self.pick.random())
        self.state.array += 1
        self.state.small = torch.full((self.pick.randrange(1, 6),), float(self.pick.randrange(9)))

    def draws(self) -> None:
        random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(1)
        for _ in range(self.pick.randrange(3)):
            np.random.randn()

    def buffers(self) -> None:
        self.model.late = None if self.pick.random() < 0.5 else torch.rand(self.pick.randrange(4))
        self.model.seen = torch.rand(3)

    def count(self) -> None:
        with torch.no_grad():
            self.parameter().mul_(0.5).add_(1)

    def average_in_place(self) -> None:
        self.state.average.lerp_(torch.ones(()), 0.5)

    def data(self) -> None:
        self.parameter().data.mul_(0.5).add_(1)

    def data_of_view(self) -> None:
        self.parameter().detach().view(-1)[1:].data.add_(1)

    def data_in_compiled_code(self) -> None:
        add_to_data(self.parameter())

    def apply(self) -> None:
        tensor = self.parameter_of_model().detach()
        tensor.apply_(lambda x: x + 1) if self.pick.random() < 0.5 else tensor.map_(tensor, lambda x, y: x + y + 1)

    def fused(self) -> None:
        tensor = self.parameter_of_model().detach()
        rates = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1.0, "dampening": 0.0}
        torch._fused_sgd_(
            [tensor], [torch.ones_like(tensor)], [], **rates, nesterov=False, maximize=False, is_first_step=False
        )

    def foreign_memory(self) -> None:
        self.memory += 1

    def foreign_value_again(self) -> None:
        """Write a value that the memory may have had before, so a comparison with the past shows no write."""
        self.memory[:] = self.pick.randrange(2)

    def foreign_elements(self) -> None:
        self.memory[self.pick.randrange(3)] = self.pick.randrange(2)
        self.weights[0, self.pick.randrange(3)] = self.pick.randrange(2)

    def table_again(self) -> None:
        value = self.pick.randrange(2)
        self.pick.choice([self.model.table.data.fill_, self.model.table.numpy().fill])(value)

    def capsule_from_before(self) -> None:
        self.earlier.add_(1)

    def second_number(self) -> None:
        """Change numpy's random state in its second normal number only."""
        kind, key, position, _, _ = np.random.get_state()
        np.random.set_state((kind, key, position, self.pick.randrange(2), self.pick.random()))

    def keep_data(self) -> None:
        self.handles.append(self.parameter().data)

    def keep_array(self) -> None:
        self.handles.append(torch.from_numpy(self.parameter().detach().numpy()))

    def keep_capsule(self) -> None:
        self.handles.append(torch.from_dlpack(self.parameter().detach()))

    def keep_detached(self) -> None:
        self.handles.append(self.parameter().detach())

    def write_handle(self) -> None:
        if self.handles:
            self.pick.choice(self.handles).add_(1)

    def lose_handles(self) -> None:
        self.handles.clear()

    def storage(self) -> None:
        self.parameter().untyped_storage()[0] = self.pick.randrange(100)

    def share(self) -> None:
        with torch.no_grad():
            torch.empty(0).set_(self.parameter()).add_(1)

    def other_memory(self) -> None:
        parameter = self.parameter()
        parameter.data = torch.rand_like(parameter)

    def into_one_vector(self) -> None:
        """Give all parameters the memory of one tensor, as flattening libraries do."""
        flat = nn.utils.parameters_to_vector(self.model.parameters())
        nn.utils.vector_to_parameters(flat, self.model.parameters())
        self.handles.append(flat)

    def swap_and_back(self) -> None:
        """Evaluate with other weights, as averaging libraries do; a failure may strike before they are put back."""
        kept = [p.data for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data = torch.rand_like(p)
        if self.pick.random() < 0.5:
            for p, data in zip(self.model.parameters(), kept, strict=True):
                p.data = data

    def restore_other(self) -> None:
        with suppress(Exception):
            self.other.restore()

    def restore(self) -> None:
        self.state.restore()

    def clear_optimizer(self) -> None:
        self.state.first.state.clear()

    def new_group(self) -> None:
        if not isinstance(self.state.second, torch.optim.LBFGS):  # it accepts only one
            self.state.second.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    # ---------------------------------------------------------------------------------------------- ticks and failure

    def content(self) -> list[bytes]:
        values: dict[str, Any] = {}
        trees = {name: _plain(value) for name, value in self.state.capture().items()}
        found = [f"{name} {_sorted(flatten(tree, name, values))!r}" for name, tree in sorted(trees.items())]
        found += [
            f"{name} {value.dtype} {tuple(value.shape)} {_bytes(value)!r}" for name, value in sorted(values.items())
        ]
        numpy, cpu = np.random.get_state(), torch.get_rng_state()
        found.append(f"random state {random.getstate()!r}")
        found.append(f"numpy's random state {(numpy[1].tobytes(), *numpy[2:])!r} torch's {cpu.numpy().tobytes()!r}")
        return [part.encode() for part in found]

    def tick(self, every: int) -> None:
        self.oracle[CommitId(1, self.member.ticks + 1)] = self.content()
        self.state.commit(every=every)

    def run(self) -> str:
        """Run the program. Return the outcome: ``recorded``, ``refused``, or ``committed`` at the last tick."""
        harmless = [self.values, self.draws, self.buffers, self.schedule_step, self.learning_rate]
        counted = [self.count, self.average_in_place, self.clear_optimizer, self.lose_handles, self.keep_detached]
        devious = [
            *(self.data, self.data_of_view, self.keep_data, self.keep_array, self.storage, self.share, self.restore),
            *(self.other_memory, self.into_one_vector, self.swap_and_back, self.restore_other, self.write_handle),
            *(self.keep_capsule, self.new_group, self.partly_optimize, self.data_in_compiled_code, self.apply),
            *(self.fused, self.foreign_memory, self.capsule_from_before, self.second_number),
        ]
        again = [self.foreign_value_again, self.foreign_elements, self.table_again]
        is_devious = self.pick.random() < DEVIOUS
        anything = [*harmless, *counted, *(devious if is_devious else [])]
        if is_again := self.pick.random() < AGAIN:
            anything = again
        self.state.commit()
        self.oracle[CommitId(1, 1)] = self.content()
        for _ in range(self.pick.randrange(2, 9)):
            self.forward()
            self.optimize()
            for _ in range(self.pick.randrange(4)):
                self.pick.choice(anything if self.pick.random() < 0.3 else harmless)()
            self.tick(every=self.pick.choice((1000, 1000, 1000, 2)))
        last, is_committed = CommitId(1, self.member.ticks), self.committer.commits[0] == CommitId(1, self.member.ticks)
        done = [self.pick.choice([*harmless[:3], self.forward]) for _ in range(self.pick.randrange(3))]
        if is_devious or is_again:
            done += [self.pick.choice(anything) for _ in range(self.pick.randrange(4))]
        self.pick.shuffle(done)
        for operation in done:
            operation()
        self.struck = ", ".join(operation.__name__ for operation in done)
        self.fail()
        newest = self.committer.commits[0]
        self.check(newest)
        return "committed" if is_committed else "recorded" if newest == last else "refused"

    def fail(self) -> None:
        self.committer.commit_last_tick()
        self.state.restore()

    def check(self, newest: CommitId | None) -> None:
        found, expected = self.content(), self.oracle[newest]
        differing = [(f[:900], e[:900]) for f, e in zip(found, expected, strict=True) if f != e]
        assert not differing, f"{newest} after {self.struck}: {differing[:3]}"


def _add_to_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


add_to_data = torch.jit.script(_add_to_data)


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(value.tobytes()).digest()


def _sorted(tree: Any) -> Any:
    """Return a tree whose dicts are lists in the order of their keys: a restore may change the order."""
    if isinstance(tree, dict):
        return [(key, _sorted(item)) for key, item in sorted(tree.items(), key=lambda pair: str(pair[0]))]
    return [_sorted(item) for item in tree] if isinstance(tree, list) else tree


def _plain(value: Any) -> Any:
    return value.tree if hasattr(value, "tree") else value


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for processors make the programs many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_a_record_is_the_state_of_the_last_tick_or_is_refused(schedules: range) -> None:
    programs = some_of(schedules, 4)
    outcomes: Counter[str] = Counter()
    for seed in programs:
        program = Program(seed)
        try:
            outcomes[program.run()] += 1
        except Exception as error:
            raise AssertionError(f"program {seed}: {error}") from error
    print(outcomes)
    assert outcomes["recorded"] > len(programs) / 3
    assert outcomes["refused"] > len(programs) / 20
