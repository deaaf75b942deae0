"""``attach`` in a world of one: its errors, the start from the commit line, and files that torch reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from elasticstate.commits import Shard as Place, Sharding
from elasticstate.compat import dtensors
from elasticstate.core.ids import CommitId
from elasticstate.errors import CollectiveError, StateError, UsageError
from elasticstate.state.attached import RestoreTargets
from elasticstate.state.base import committer_of
from elasticstate.state.reshard import CommitCopies
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState
from tests.integration.scripts.slow_device import SlowDevice
from tests.kit.sharded import SnapshotCopies, source
from tests.kit.state import FileStorage, Member, OneClock, World, read_commit

LINE = CommitId(1, 2)


def state_in(member: Member, storage: Any = None) -> Any:
    state = TorchState(note="plain", table=torch.zeros(2))
    if storage is not None:
        committer_of(state).use_storage(storage)
    committer_of(state).use_session(member)
    state.sync()
    return state


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(storage: Any = None, ticks: int = 2) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    """Return a state that has made commit (1, 2) with attached values."""
    state = state_in(Member(World(1)), storage)
    model, optimizer = parts()
    state.attach(model=model, optimizer=optimizer, init=lambda: None)
    for tick in range(ticks):
        step(model, optimizer)
        state.note = f"tick {tick + 1}"
        state.table += 1
        state.commit()
    return state, model, optimizer


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dtensors.clear_mesh_caches()
    dist.destroy_process_group()


class Alone(torch.nn.Module):
    """One parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(value)


WRONG: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "no value": (lambda s: s.attach(init=print), UsageError, "no values"),
    "a name of the state": (lambda s: s.attach(note=Alone(torch.ones(1)), init=print), UsageError, "of this name"),
    "no init": (lambda s: s.attach(model=Alone(torch.ones(1))), UsageError, "needs init"),
    "no state_dict": (lambda s: s.attach(model=3, init=print), UsageError, r"attach\(model=…\): a int has no"),
    "meta": (
        lambda s: s.attach(model=Alone(torch.ones(1, device="meta")), init=print),
        StateError,
        r"model\.w is on the meta device\. Call model\.to_empty",
    ),
    "a foreign parameter": (
        lambda s: s.attach(model=Alone(torch.ones(1)), opt=torch.optim.SGD([torch.ones(2)]), init=lambda: None),
        StateError,
        "create the optimizer after fully_shard",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_says_what_to_do(case: str) -> None:
    state = state_in(Member(World(1)))
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call(state)


def test_the_second_call_and_a_call_after_a_tick_are_refused() -> None:
    state, model, _ = trained()
    with pytest.raises(UsageError, match="called before in this world"):
        state.attach(model=model, init=print)
    late = state_in(Member(World(1)))
    late.commit()
    with pytest.raises(UsageError, match="after the first tick"):
        late.attach(model=model, init=print)


def test_a_partial_dtensor_is_refused_by_name(mesh: DeviceMesh) -> None:
    model = Alone(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(StateError, match=r"model\.w is a DTensor that cannot be committed: its placement P\(sum\)"):
        state_in(Member(World(1))).attach(model=model, init=print)


def test_shards_in_plain_tensors_are_refused(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.warns(UserWarning, match="NO_SHARD"):  # in a world of one
        model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(3, 2), device_id=torch.device("cpu")))
    with pytest.raises(UsageError, match=r"model contains a FullyShardedDataParallel .* Use .*fully_shard"):
        state_in(Member(World(1))).attach(model=model, init=print)
    with pytest.raises(UsageError, match=r"state\.model contains a FullyShardedDataParallel"):
        TorchState(model=model)
    with pytest.raises(UsageError, match=r"state\.models\.1 contains a FullyShardedDataParallel"):
        TorchState(models=[torch.nn.Linear(2, 2), model])


def test_arrays_in_attached_values_are_refused() -> None:
    class WithArray:
        def state_dict(self) -> dict[str, Any]:
            return {"x": np.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(StateError, match=r"thing\.x is a ndarray"):
        state_in(Member(World(1))).attach(thing=WithArray(), init=lambda: None)


def test_attach_runs_init_seals_the_first_commit_of_the_world_and_reports_the_digest() -> None:
    member = Member(World(1))
    state = state_in(member)
    model, _ = parts()
    calls: list[str] = []
    state.attach(model=model, init=lambda: calls.append("init"))
    assert calls == ["init"]
    assert state.commits == (CommitId(1, 0), None)
    assert committer_of(state).snapshot._newer.frame.sharding.names == ("model",)
    (digests,) = member.attached
    assert [digest > 0 for digest in digests] == [True], "one digest for each rank"
    state.check()


def test_the_plain_part_of_a_commit_has_no_attached_values() -> None:
    state, _, _ = trained()
    values = read_commit(committer_of(state).snapshot, LINE)
    assert set(values) == {"note", "table", "table.requires_grad"}
    with pytest.raises(UsageError, match="restore"):
        state.restore()
    committer_of(state).detach()
    state.note = "changed"
    state.restore()
    assert state.note == "tick 2"


def test_a_world_with_a_line_requires_attach_before_commits_and_ticks() -> None:
    state = state_in(Member(World(1, 2, line=LINE)))
    for call in (state.commit, state.check_host_updates):
        with pytest.raises(UsageError, match=r"Call state\.attach\(\) in each world"):
            call()


def world_after(state: Any, slots: int = 1, line: CommitId = LINE) -> World:
    """Return a world that starts from the commits of a state, which are in slot 0."""
    world = World(1, 2, line=line, sources=tuple(source(7, slot, line) for slot in range(slots)))
    world.reader = SnapshotCopies(lambda slot: committer_of(state).snapshot)
    return world


def content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return repr((model.state_dict(), optimizer.state_dict()))


def test_a_new_worker_gets_plain_and_attached_values_from_another_ones_copy() -> None:
    torch.manual_seed(3)
    state, model, optimizer = trained()
    member = Member(world_after(state))
    other = TorchState(note="", table=torch.zeros(2))
    committer = committer_of(other)
    committer.use_session(member)
    assert committer.start_from_line()
    other.sync()
    assert (other.note, other.table.tolist()) == ("tick 2", [2, 2])
    assert other.commits == (None, None)
    torch.manual_seed(4)
    new_model, new_optimizer = parts()
    new_optimizer.param_groups[0]["lr"] = 7.0
    other.attach(model=new_model, optimizer=new_optimizer)
    assert content(new_model, new_optimizer) == content(model, optimizer)
    assert other.commits == (CommitId(2, 0), None)
    reader: Any = member.copy_reader()
    assert reader.closed == 2


class Watched(SnapshotCopies):
    """Reader that notes the commits of a state whenever a copy is opened, and waits for the growth of its buffer."""

    def __init__(self, source: Any, state: Any) -> None:
        super().__init__(lambda slot: committer_of(source).snapshot)
        self._state = state
        self.held: list[Any] = []

    def header(self, copy: Any) -> bytes:
        self.held.append(self._state.commits)
        return super().header(copy)

    def read_into(self, copy: Any, ranges: Any) -> None:
        deadline = time.monotonic() + 30
        while self._state.commits[1] is not None:
            assert time.monotonic() < deadline, f"no buffer grows while shards are read: {self._state.commits}"
            time.sleep(0.001)
        super().read_into(copy, ranges)


def before_growth(file_storage: Callable[..., FileStorage]) -> tuple[Any, torch.nn.Module, Watched]:
    """Return a state whose newest commits are small, and newer than the line, a model to attach, and its reader."""
    source_state = state_in(Member(World(1)))
    torch.manual_seed(5)
    model = torch.nn.Linear(300, 300)
    source_state.attach(model=model, init=lambda: None)
    state = state_in(Member(World(1)), file_storage())
    for _ in range(4):
        state.commit()
    reader = Watched(source_state, state)
    line = CommitId(1, 0)
    world = World(1, 2, line=line, sources=(source(7, 0, line),))
    world.reader = reader
    committer_of(state).use_session(Member(world))
    return state, model, reader


def test_the_older_buffer_grows_while_shards_are_read_when_all_copies_are_open(
    file_storage: Callable[..., FileStorage],
) -> None:
    state, model, reader = before_growth(file_storage)
    new = torch.nn.Linear(300, 300)
    state.attach(model=new)
    assert torch.equal(new.weight, model.weight)
    assert reader.held == [(CommitId(1, 4), CommitId(1, 3))]
    assert state.commits == (CommitId(2, 0), CommitId(1, 4))


@pytest.mark.parametrize("cause", ["a copy cannot be opened", "another rank has failed"])
def test_no_commit_is_lost_while_some_copy_may_not_be_readable(
    file_storage: Callable[..., FileStorage], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    state, _, reader = before_growth(file_storage)
    committer = committer_of(state)
    if cause == "a copy cannot be opened":
        reader.broken.add(0)
        reader.header = lambda copy: SnapshotCopies.header(reader, copy)  # type: ignore[method-assign]
    else:
        numbers_of_all = committer._numbers_of_all

        def cut(numbers: list[int]) -> list[list[int]]:
            if numbers == [0]:  # the barrier, at which this rank waits for all others
                raise CollectiveError("the generation is over")
            return numbers_of_all(numbers)

        monkeypatch.setattr(committer, "_numbers_of_all", cut)
    with pytest.raises(CollectiveError):
        state.attach(model=torch.nn.Linear(300, 300))
    assert state.commits == (CommitId(1, 4), CommitId(1, 3))


@pytest.mark.parametrize(("line", "note"), [(LINE, "tick 2"), (CommitId(1, 1), "tick 1")])
def test_a_worker_starts_from_its_own_commit_if_it_has_the_line(
    file_storage: Callable[..., FileStorage], line: CommitId, note: str
) -> None:
    trained(file_storage())
    state = TorchState(note="", table=torch.zeros(2))
    committer = committer_of(state)
    committer.use_storage(file_storage())
    committer.use_session(Member(World(1, 2, line=line)))  # without any source
    assert committer.resume()
    assert committer.start_from_line()
    assert (state.note, state.commits[0]) == (note, line)


def test_other_values_than_those_of_the_commit_are_refused() -> None:
    state, _, _ = trained()
    model, _ = parts()
    wider = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    deeper = torch.nn.Sequential(*model, torch.nn.Linear(2, 2))
    for values, text in (
        ({"model": model}, "attach.. has the values model, and the commit has model, optimizer"),
        ({"model": wider, "optimizer": torch.optim.SGD(wider.parameters())}, r"model\.0\.weight is \(3, 3\)"),
        ({"model": deeper, "optimizer": torch.optim.SGD(model.parameters())}, "different parameters: 2.bias, 2.weight"),
        ({"model": model, "optimizer": torch.optim.Adam(model.parameters())}, "optimizer is a Adam, .* no betas"),
    ):
        other = state_in(Member(world_after(state)))
        with pytest.raises(StateError, match=text):
            other.attach(**values)


def test_groups_and_modes_are_those_of_the_commit() -> None:
    state = state_in(Member(World(1)))
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    model[0].requires_grad_(False)
    state.attach(model=model, optimizer=optimizer, init=lambda: None)
    model[0].requires_grad_(True)
    model[1].eval()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    committer_of(state).seal(CommitId(1, 1))
    other = state_in(Member(world_after(state, line=CommitId(1, 1))))
    new = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1))
    new[0].requires_grad_(False)
    fresh = torch.optim.SGD(new[2].parameters(), lr=0.1, momentum=0.9)
    other.attach(model=new, optimizer=fresh)
    assert [(len(group["params"]), group["lr"]) for group in fresh.param_groups] == [(2, 0.1), (2, 0.5)]
    assert all(p.requires_grad for p in new.parameters())
    assert [m.training for m in new.modules()] == [True, True, False, True]
    for mine, its in zip(model.parameters(), new.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], fresh.state[its]["momentum_buffer"])


def test_buffers_get_the_shapes_of_the_commit_and_extra_state_is_set() -> None:
    class Cached(Alone):
        extra = 1

        def get_extra_state(self) -> dict[str, Any]:
            return {"n": self.extra, "t": torch.full((2,), float(self.extra))}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.extra = state["n"] + int(state["t"].sum())

    state = state_in(Member(World(1)))
    model = Cached(torch.ones(1))
    model.register_buffer("cache", torch.arange(5.0), persistent=False)
    model.register_buffer("none", None)
    model.extra = 4
    state.attach(model=model, init=lambda: None)
    other = state_in(Member(world_after(state, line=CommitId(1, 0))))
    new = Cached(torch.zeros(1))
    new.register_buffer("cache", torch.zeros(2), persistent=False)
    new.register_buffer("gone", torch.zeros(2))
    other.attach(model=new)
    assert new.cache.tolist() == [0, 1, 2, 3, 4]
    assert dict(new.named_buffers()).keys() == {"cache"}
    assert (new.extra, new.w.item()) == (4 + 8, 1)


def on_device(mesh: DeviceMesh, device: SlowDevice) -> tuple[TorchState, Alone]:
    """Return a state with an attached model, in its first world. Its commits are copied from the device."""
    state = TorchState(note=0)
    committer_of(state).snapshot = Snapshot(None, lambda _: device)
    committer_of(state).use_session(Member(World(1)))
    state.sync()
    model = Alone(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state.attach(model=model, optimizer=optimizer, init=lambda: None)
    return state, model


def test_a_commit_of_shards_on_a_device_is_sealed_before_the_next_tick(mesh: DeviceMesh, device: SlowDevice) -> None:
    """Otherwise a rank could overwrite its commit before this one, while another rank has not sealed this one."""
    state, _ = on_device(mesh, device)
    committer_of(state).begin()
    assert state.commits == (CommitId(1, 1), CommitId(1, 0))


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_commit_of_shards_that_are_written_while_a_device_copies_them_is_discarded(
    is_torn: bool, mesh: DeviceMesh, device: SlowDevice
) -> None:
    state, model = on_device(mesh, device)
    committer_of(state)._begin(CommitId(1, 1))
    if is_torn:
        with torch.no_grad():
            model.w.add_(1)
    committer_of(state).settle()
    assert state.commits[0] == CommitId(1, 0 if is_torn else 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_directory_of_commits(tmp_path: Path) -> None:
    """Two workers hold rows 0 to 2 and rows 3 to 4 of a matrix."""
    whole = torch.randn(5, 3)
    low = torch.randn(5).bfloat16()
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        places = {"model.w": Place((5, 3), (rows.start, 0)), "model.low": Place((5,), (rows.start,))}
        places["model.all"] = Place((3,), (0,))
        tensors = {"model.w": whole[rows].clone(), "model.low": low[rows].clone(), "model.all": torch.arange(3)}
        snapshot = Snapshot()
        snapshot.begin(
            {**tensors, "model": "tree", "own": torch.ones(2)}, b"", LINE, sharding=Sharding(("model",), places)
        )
        (tmp_path / f"{rank}.safetensors").write_bytes(snapshot._newer.memory.numpy().tobytes())
    found = {"model.w": torch.zeros(5, 3), "model.low": torch.zeros(5).bfloat16(), "model.all": torch.zeros(3).long()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(found["model.w"], whole)
    assert torch.equal(found["model.low"], low)
    assert found["model.all"].tolist() == [0, 1, 2]


def test_state_that_parameters_share_is_shared_by_those_of_a_new_worker() -> None:
    def attached(member: Member) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
        state = state_in(member)
        model = Alone(torch.ones(2))
        model.other = torch.nn.Linear(2, 2)
        optimizer = OneClock(model.parameters())
        state.attach(model=model, optimizer=optimizer, init=lambda: None)
        return state, model, optimizer

    state, model, optimizer = attached(Member(World(1)))
    for _ in range(2):
        optimizer.step()
        state.commit()
    _, newcomers, of_newcomer = attached(Member(world_after(state)))
    assert len({id(entry["clock"]) for entry in of_newcomer.state.values()}) == 1
    for each in (optimizer, of_newcomer):
        each.step()
    assert content(model, optimizer) == content(newcomers, of_newcomer)


def test_tensors_at_the_same_place_of_two_copies_are_not_one() -> None:
    states = {}
    for slot, name in enumerate(("left", "right")):
        state = states[slot] = state_in(Member(World(1)))
        state.attach(**{name: Alone(torch.full((2,), float(slot)))}, init=lambda: None)
        for _ in range(2):
            state.commit()
    reader = SnapshotCopies(lambda slot: committer_of(states[slot]).snapshot)
    copies = CommitCopies(reader, [source(slot, slot, LINE) for slot in states])
    targets = RestoreTargets(copies)
    left, right = (targets.tensor(None, f"{name}.w", torch.device("cpu")) for name in ("left", "right"))
    assert left is not right
    targets.load(None)
    assert (left.tolist(), right.tolist()) == ([0, 0], [1, 1])
