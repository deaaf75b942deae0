"""Commits of a device that go on behind the training's back: whatever happens meanwhile, what is sealed is right.

The device is a thread that copies memory as late as it may (scripts/slow_device.py): a write that comes too early is
seen in the commit.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scripts.slow_device import SlowDevice

from elasticstate import config
from elasticstate.core.types import CommitId
from elasticstate.errors import CollectiveError, OptionError
from elasticstate.state import TorchState, overlap
from elasticstate.state.overlap import Copy
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.space import PrivateSpace

Space = Callable[..., Any]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    """Moves only where somebody waits for it."""
    device = SlowDevice()
    wait = Copy.wait

    def wait_for_device(copy: Copy) -> Any:
        if device.error is None:
            device.finish()
        return wait(copy)

    monkeypatch.setattr(Copy, "wait", wait_for_device)
    yield device
    device.stop()


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def contents(state: TorchState) -> str:
    """All tensors to the last digit, by name, and the note."""
    values = {k: v.tolist() for k, v in state.capture().items() if isinstance(v, torch.Tensor | np.ndarray)}
    return repr([sorted(values.items()), state.note])


class Job:
    """A worker alone in a world, whose tensors are on a device."""

    def __init__(self, device: SlowDevice, space: Any, session: Any, **more: Any) -> None:
        torch.manual_seed(0)
        model, optimizer = parts()
        self.state = TorchState(model=model, optimizer=optimizer, **more, note=[0])
        self.device, self.session = device, session
        self.state._snapshot = Snapshot(space, lambda _: device)
        self.state._bind(session)
        self.was: dict[CommitId, str] = {}  # the content at each commit

    def train(self) -> None:
        self.forward().backward()
        self.state.optimizer.step()
        self.state.note = [self.state.note[0] + 1]

    def forward(self) -> torch.Tensor:
        self.state.optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 32).view(8, 4) * (self.state.note[0] + 1)
        loss: torch.Tensor = self.state.model(inputs).square().mean()
        return loss

    def commit(self) -> CommitId:
        commit = CommitId(self.session.generation, self.session.ticks + 1)
        self.was[commit] = contents(self.state)
        self.state.commit()
        return commit

    def restored(self) -> CommitId:
        """Go back; returns to which commit, whose content it is."""
        self.state.restore()
        newest = self.state.commits[0]
        assert newest is not None
        assert contents(self.state) == self.was[newest]
        return newest


def note_of(content: str) -> list[int]:
    """``note`` is the last value."""
    return [int(content[content.rindex("[") + 1 : content.index("]", content.rindex("["))])]


@pytest.fixture
def job(device: SlowDevice, file_space: Space, member: Any, world: Any) -> Job:
    """It has trained, and made commit (1, 1)."""
    job = Job(device, file_space(), member(world(1)))
    job.train()
    job.commit()
    job.train()
    job.state._settle()
    assert job.state.commits == (CommitId(1, 1), None)
    return job


def found(file_space: Space) -> tuple[CommitId | None, CommitId | None]:
    """What a new worker would hold, if this one died now."""
    snapshot = Snapshot(file_space())
    return snapshot.newest, snapshot.previous


# -------------------------------------------------------------------------------------------------------- the ordinary


def test_a_commit_returns_before_the_copy_and_counts_after_it(job: Job, file_space: Space) -> None:
    commit = job.commit()
    assert job.device.is_busy
    assert job.state.commits == found(file_space) == (CommitId(1, 1), None), "the older buffer is nobody's"
    assert job.session.ticks == 2
    job.device.finish()
    job.state._snapshot._copy[0]._done.wait()  # type: ignore[index]
    assert found(file_space) == (commit, CommitId(1, 1)), "without a word of the training's thread"
    job.state.check_host_updates()
    assert job.state.commits == job.session.commits[-1] == (commit, CommitId(1, 1)), "told at the next tick"
    assert job.restored() == commit


def test_a_tick_does_not_wait_for_the_copy(job: Job) -> None:
    job.commit()
    told = len(job.session.commits)
    for _ in range(3):
        job.state.check_host_updates()
    assert job.device.is_busy
    assert len(job.session.commits) == told


def test_forward_and_backward_go_on_and_the_step_waits(job: Job) -> None:
    commit = job.commit()
    job.forward().backward()
    assert job.device.is_busy
    held_back = job.device.held_back
    job.state.optimizer.step()
    assert job.device.held_back == held_back + 1
    assert not job.device.is_busy
    job.state.optimizer.step()
    assert job.restored() == commit


def test_the_step_of_an_optimizer_that_the_state_does_not_know_waits_too(job: Job) -> None:
    other = torch.optim.SGD(job.state.model.parameters(), lr=1.0)
    commit = job.commit()
    job.forward().backward()
    other.step()
    assert job.restored() == commit


def test_what_a_forward_pass_writes_is_copied_before_it(job: Job) -> None:
    commit = job.commit()
    before = job.state.model[1].running_mean.clone()
    job.forward()
    assert not torch.equal(job.state.model[1].running_mean, before)
    assert job.device.is_busy, "the parameters are not"
    assert job.restored() == commit


def test_tensors_that_are_no_optimizers_are_copied_at_once(
    device: SlowDevice, file_space: Space, member: Any, world: Any
) -> None:
    """A user's own, parameters that nobody trains, a teacher that follows, and what a captured step writes."""
    frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    teacher = torch.nn.Linear(3, 3)
    graphed = torch.nn.Linear(3, 3)
    job = Job(
        device,
        file_space(),
        member(world(1)),
        mine=torch.ones(5),
        frozen=frozen,
        teacher=teacher,
        graphed=graphed,
        captured=torch.optim.SGD([*graphed.parameters()], lr=0.1),
        trained_too=torch.optim.SGD([*frozen.parameters()], lr=0.1),
    )
    job.state.captured.param_groups[0]["capturable"] = True
    commit = job.commit()
    with torch.no_grad():
        for tensor in (job.state.mine, *frozen.parameters(), *teacher.parameters(), *graphed.parameters()):
            tensor.data.fill_(7.0)  # a write that no version counts
    assert job.device.is_busy, "the others are not copied yet"
    assert job.restored() == commit


def test_two_commits_in_a_row(job: Job, file_space: Space) -> None:
    first = job.commit()
    second = job.commit()
    assert job.state.commits == found(file_space) == (first, None), "the first one was waited for"
    job.train()
    third = job.commit()
    assert job.state.commits == (second, None)
    assert job.restored() == third
    job.state._snapshot.drop_newest()
    assert job.restored() == second


def test_ids_go_on_where_there_is_no_world(device: SlowDevice) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = TorchState(model=torch.nn.ParameterList([weight]), optimizer=torch.optim.SGD([weight], lr=1.0))
    state._snapshot = Snapshot(None, lambda _: device)
    for tick in (1, 2, 3):
        state.commit()
        assert state.commits[0] == (CommitId(0, tick - 1) if tick > 1 else None)
    state._settle()
    assert state.commits == (CommitId(0, 3), CommitId(0, 2))


def test_a_large_state_goes_in_pieces_beside_arrays_and_tied_and_empty_tensors(
    device: SlowDevice, file_space: Space, member: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "CHUNK_BYTES", 40)
    shared = torch.arange(30.0)
    job = Job(
        device,
        file_space(),
        member(world(1)),
        array=np.arange(11.0),
        holes=torch.arange(12.0).view(3, 4).t(),
        half=torch.arange(5, dtype=torch.bfloat16),
        one=shared[:10],
        two=shared[:10],
        none=torch.empty(0),
        flags=torch.tensor([True, False, True]),
    )
    for _ in range(3):
        job.train()
        job.state.array += 5.0
        commit = job.commit()
        job.state.array[:] = -1.0
    assert job.restored() == commit
    assert job.device.brought


# ------------------------------------------------------------------------------------------------- what comes between


def test_a_process_that_ends_in_mid_copy_leaves_the_older_commit(job: Job, file_space: Space) -> None:
    """At each step of the device."""
    job.commit()
    while job.device.is_busy:
        left = Snapshot(file_space())
        assert (left.newest, left.previous) == (CommitId(1, 1), None)
        assert left.read(CommitId(1, 1))["note"] == note_of(job.was[CommitId(1, 1)])
        job.device.advance()
    job.state._settle()
    assert found(file_space) == (CommitId(1, 2), CommitId(1, 1))


def test_a_failure_in_mid_copy_goes_back_to_that_commit_if_the_generation_still_stands(job: Job) -> None:
    commit = job.commit()
    job.forward().backward()
    assert job.device.is_busy
    assert job.restored() == commit
    assert job.session.commits[-1] == (commit, CommitId(1, 1))


def test_what_is_not_copied_when_the_generation_ends_is_given_up(job: Job, file_space: Space) -> None:
    job.commit()
    job.forward().backward()
    job.session.is_over = True
    assert job.restored() == CommitId(1, 1)
    assert job.session.commits[-1] == found(file_space) == (CommitId(1, 1), None)


def test_what_is_copied_when_the_generation_ends_is_kept(job: Job, file_space: Space) -> None:
    commit = job.commit()
    job.device.finish()
    job.state._snapshot._copy[0]._done.wait()  # type: ignore[index]
    job.session.is_over = True
    assert job.restored() == commit


def test_a_commit_that_was_given_up_may_be_made_again_under_its_id(job: Job) -> None:
    job.commit()
    job.session.is_over = True
    job.state._settle()
    job.session.is_over = False
    job.session.ticks -= 1
    job.train()
    commit = job.commit()
    assert job.restored() == commit == CommitId(1, 2)


def test_an_interrupts_save_finds_the_commit_of_its_tick_on_its_way(job: Job) -> None:
    commit = job.commit()
    job.state._settle()
    assert job.state.commits[0] == commit


def test_a_save_for_an_interrupt_is_there_when_it_returns(job: Job, file_space: Space) -> None:
    job.commit()
    job.train()
    job.session.tick()
    here = CommitId(1, 3)
    job.was[here] = contents(job.state)
    job.state._seal(here)
    assert job.state.commits == job.session.commits[-1] == found(file_space) == (here, CommitId(1, 2))
    assert job.restored() == here


def test_a_save_is_refused_when_the_generation_ends_meanwhile(job: Job, file_space: Space) -> None:
    job.session.is_over = True
    with pytest.raises(CollectiveError, match="before its commit was copied"):
        job.state._seal(CommitId(1, 2))
    assert job.state.commits == job.session.commits[-1] == found(file_space) == (CommitId(1, 1), None)


def test_a_sync_in_mid_copy_sends_that_commit(
    job: Job, device: SlowDevice, tmp_path: Any, member: Any, world: Any, together: Any
) -> None:
    job.train()
    commit = job.commit()
    job.state.optimizer.zero_grad()
    newcomer = TorchState(model=parts()[0], optimizer=None, note=[0])
    newcomer.optimizer = torch.optim.AdamW(newcomer.model.parameters(), lr=0.1)
    newcomer._snapshot = Snapshot(None, lambda _: device)
    both = world(2, generation=2, lacking=(1,))
    job.session.world = both
    newcomer._bind(member(both, 1))
    together(job.state.sync, newcomer.sync)
    assert job.state.commits == (CommitId(2, 0), CommitId(1, 1))
    assert newcomer.commits == (CommitId(2, 0), None)
    assert device.brought, "straight to the newcomer's device"
    assert contents(newcomer) == job.was[commit]


LOOKS: dict[str, Callable[[TorchState], object]] = {
    "check": lambda state: state.check(),
    "outgoing": lambda state: state._snapshot.outgoing(),
    "incoming": lambda state: state._snapshot.incoming(
        msgspec.msgpack.encode((state._snapshot._newer.frame.layout, 9)), b""
    ),
    "summary": lambda state: state._snapshot.summary(),
    "details": lambda state: state._snapshot.details(),
    "restamp": lambda state: state._snapshot.restamp(CommitId(1, 50)),
    "reserve": lambda state: state._snapshot.reserve(10),
    "read": lambda state: state._snapshot.read(CommitId(1, 2)),
    "forget": lambda state: state._snapshot.forget(),
    "drop_newest": lambda state: state._snapshot.drop_newest(),
    "attach": lambda state: state._attach(PrivateSpace()),
    "bind": lambda state: state._bind(state._session),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_into_a_buffer_waits_for_the_copy(look: str, job: Job) -> None:
    job.commit()
    assert job.device.is_busy
    LOOKS[look](job.state)
    assert not job.device.is_busy
    assert job.state._snapshot.is_settled


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_an_error_of_the_device_costs_that_commit_alone(
    job: Job, file_space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    job.device.fail(RuntimeError("an illegal memory access was encountered"))
    job.state._settle()
    assert job.state.commits == job.session.commits[-1] == found(file_space) == (CommitId(1, 1), None)
    assert "commit (1, 2) could not be copied from the device: an illegal memory access" in caplog.text
    with pytest.raises(RuntimeError, match="illegal"):
        job.state.commit()
    with pytest.raises(RuntimeError, match="illegal"):
        job.state._seal(CommitId(1, 3))
    assert found(file_space) == (CommitId(1, 1), None)
    job.device.error = None
    assert job.restored() == CommitId(1, 1)


def test_an_error_while_a_save_waits_is_raised(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Copy.wait

    def fail(copy: Copy) -> Any:
        job.device.fail(RuntimeError("the device has fallen off the bus"))
        return wait(copy)

    monkeypatch.setattr(Copy, "wait", fail)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        job.state._seal(CommitId(1, 2))
    assert job.state.commits == (CommitId(1, 1), None)


def test_a_damaged_commit_never_reaches_the_device(job: Job) -> None:
    commit = job.commit()
    job.state._settle()
    job.state._snapshot._newer.memory[job.state._snapshot._newer.frame.tensors + 3] ^= 1
    job.train()
    brought = job.device.brought
    assert job.restored() == CommitId(1, 1) != commit
    assert job.device.brought == brought + len(job.state._snapshot._newer.frame.layout.entries)


def write_a_parameter(job: Job) -> None:
    with torch.no_grad():
        job.state.model[0].weight.mul_(0.9)


def write_the_state_of_an_optimizer(job: Job) -> None:
    job.state.optimizer.state[job.state.model[0].weight]["exp_avg"].zero_()


def load_a_state_dict(job: Job) -> None:
    job.state.model.load_state_dict({k: v + 1 for k, v in job.state.model.state_dict().items()})


def step_without_hooks(job: Job) -> None:
    job.forward().backward()
    type(job.state.optimizer).step.__wrapped__(job.state.optimizer)


def step_compiled(job: Job) -> None:
    job.forward().backward()
    torch.compile(job.state.optimizer.step, backend="eager")()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch, as it imports what compiles
@pytest.mark.parametrize(
    "write", [write_a_parameter, write_the_state_of_an_optimizer, load_a_state_dict, step_without_hooks, step_compiled]
)
@pytest.mark.parametrize("then_steps", [False, True])
def test_a_write_that_nobody_has_announced_costs_the_commit_and_the_overlap(
    write: Callable[[Job], None], then_steps: bool, job: Job, file_space: Space, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    write(job)
    if then_steps:
        job.train()
    job.state._settle()
    assert job.state.commits == found(file_space) == (CommitId(1, 1), None)
    assert "commit (1, 2) is given up: while it was copied" in caplog.text
    commit = job.commit()
    assert not job.device.is_busy, "it was waited for at once"
    write(job)
    assert job.restored() == commit


def test_a_step_that_is_captured_for_a_graph_is_trusted_no_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: None)
    first = job.commit()
    job.forward().backward()
    finish = threading.Thread(target=job.device.finish)
    finish.start()
    job.state.optimizer.step()
    finish.join()
    assert not job.device.is_busy, "a graph that is being captured must not wait for what is not in it: Python does"
    assert job.state._snapshot.is_copied
    second = job.commit()
    assert not job.device.is_busy
    write_a_parameter(job)
    assert (job.restored(), job.state.commits[1]) == (second, first)


def test_the_device_of_these_tests_shows_what_is_written_too_early(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, and with a write that no version counts."""
    monkeypatch.setattr(Copy, "release", lambda _: None)
    commit = job.commit()
    job.state.model[0].weight.data.add_(1.0)
    with pytest.raises(AssertionError):
        job.restored()
    assert job.state.commits[0] == commit, "its checksum is right: that is of the wrong bytes"


def test_memory_that_a_parameter_leaves_is_kept_until_it_is_copied(job: Job) -> None:
    commit = job.commit()
    for parameter in job.state.model.parameters():
        parameter.data = torch.full_like(parameter, 3.0)
    job.state.model[1].running_mean = torch.zeros(6)
    job.state.optimizer.load_state_dict(job.state.optimizer.state_dict())
    assert job.restored() == commit


# --------------------------------------------------------------------------------------------------- memory to spare


def test_with_memory_to_spare_nobody_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.COMMIT_DEVICE_MEMORY, "1M")
    held_back = job.device.held_back
    commit = job.commit()
    for _ in range(2):
        job.train()
    write_a_parameter(job)
    assert job.device.held_back == held_back
    assert job.device._done == 0 or job.device.is_busy
    assert job.restored() == commit


def test_memory_to_spare_goes_first_to_what_is_waited_for_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = sum(buffer.nbytes for buffer in job.state.model.buffers())
    monkeypatch.setenv(config.COMMIT_DEVICE_MEMORY, str(buffers))
    held_back = job.device.held_back
    commit = job.commit()
    job.forward().backward()
    assert job.device.held_back == held_back
    job.state.optimizer.step()
    assert job.device.held_back == held_back + 1
    assert job.device.is_busy, "what was copied on the device comes last"
    assert job.restored() == commit


def test_bytes_to_spare_that_are_no_number_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.COMMIT_DEVICE_MEMORY, "much")
    with pytest.raises(OptionError, match="ELASTICSTATE_COMMIT_DEVICE_MEMORY: 'much': takes a number of bytes"):
        job.commit()


# ------------------------------------------------------------------------------------------------------ pinned memory


def test_memory_is_pinned_once_and_let_go_before_it_is_given_back(job: Job) -> None:
    job.commit()
    job.state._settle()
    assert len(job.device.pinned) == 2
    first = dict(job.device.pinned)
    for _ in range(2):
        job.commit()
    job.state._settle()
    assert job.device.pinned == first
    job.state.note = ["x" * (1 << 17)]
    for _ in range(2):
        job.commit()
    job.state._settle()
    assert len(job.device.pinned) == 2
    assert set(job.device.pinned).isdisjoint(first)
    job.commit()
    job.state._attach(PrivateSpace())
    assert job.device.pinned == {}


def test_a_job_without_a_device_pins_nothing_and_has_no_thread_and_no_hook() -> None:
    program = """
import threading, torch, elasticstate
from elasticstate.state import overlap
model = torch.nn.Linear(2, 2)
state = elasticstate.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.commit()
state.restore()
assert not torch.cuda.is_initialized() and not overlap._hooks and threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------------- any order


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_order_each_commit_that_is_held_is_what_it_was(
    seed: int, device: SlowDevice, file_space: Space, member: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(overlap, "CHUNK_BYTES", chance.choice([40, 200, 1 << 20]))
    monkeypatch.setenv(config.COMMIT_DEVICE_MEMORY, str(chance.choice([0, 0, 100, 400, 1 << 20])))
    job = Job(device, file_space(), member(world(1)), own=torch.zeros(7))
    for _ in range(60):
        match chance.choice(
            ["step", "step", "forward", "advance", "advance", "commit", "commit", "tick", "own", "back"]
        ):
            case "step":
                job.train()
            case "forward":
                job.forward().backward()
            case "advance":
                device.advance(chance.randrange(1, 12))
            case "commit":
                job.commit()
            case "tick":
                job.state.check_host_updates()
            case "own":
                job.state.own += 1.0
            case "back" if job.was:
                job.session.is_over = chance.random() < 0.3
                newest = job.state.commits[0]
                if newest is not None or not job.session.is_over:
                    assert newest is None or job.restored() >= newest
                job.session.is_over = False
        left = Snapshot(file_space())
        for commit in (left.newest, left.previous):
            assert commit is None or left.read(commit)["note"] == note_of(job.was[commit])
    job.state._settle()
    newest, previous = job.state.commits
    assert job.restored() == newest
    if previous is not None:
        job.state._snapshot.drop_newest()
        assert job.restored() == previous
