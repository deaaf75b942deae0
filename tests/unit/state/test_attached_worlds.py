"""Attached values in real worlds: FSDP2, HSDP and tensor parallelism on processes with Gloo, from world to world."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elasticstate.commits import decode
from elasticstate.core.ids import CommitId
from elasticstate.errors import StateDivergedError
from elasticstate.state.attached import RestoreTargets
from elasticstate.state.base import committer_of
from elasticstate.state.torch import TorchState
from tests.kit.sharded import FileCopies, GroupMember, WorldServer, keepers, source
from tests.kit.state import FileStorage

Tensors = dict[str, torch.Tensor]


class Low(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.float().sum()


class Net(torch.nn.Module):
    """Sizes that no world divides evenly, a frozen parameter, a tied one, buffers, and half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(6, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.b = torch.nn.Linear(7, 8)
        self.c = torch.nn.Linear(8, 6)
        self.tied = self.a.bias
        self.low = Low()
        self.frozen = torch.nn.Parameter(torch.empty(2, 3), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(torch.tanh(self.b(self.norm(torch.tanh(self.a(x))))))
        return self.low(y) + self.frozen.sum()

    def fill(self) -> None:
        """Give each rank other random numbers: replicas are equal only if ``attach`` makes them equal."""
        torch.manual_seed(17 + dist.get_rank())
        with torch.no_grad():
            for parameter in self.parameters():
                local_of(parameter).uniform_(-0.5, 0.5)
            self.seen.fill_(dist.get_rank())
            self.cache.fill_(dist.get_rank())


def local_of(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def fsdp(shape: tuple[int, ...]) -> Net:
    """FSDP2 on a mesh of one dimension, or HSDP on one of two."""
    names = ("replica", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = meta_net()
    for part in (model.b, model.c, model.low):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def fsdp_of_wrapped_blocks(shape: tuple[int, ...]) -> Net:
    """FSDP2 of a block with activation checkpointing, of a compiled one, and of one that is both."""
    mesh = init_device_mesh("cpu", shape)
    model: Any = meta_net()
    model.a = checkpoint_wrapper(model.a)
    model.b = torch.compile(model.b, backend="aot_eager")
    model.c = torch.compile(checkpoint_wrapper(model.c), backend="aot_eager")
    for part in (model.b, model.c, model.low):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    found: Net = model
    return found


def fsdp_and_tensor_parallel(shape: tuple[int, ...]) -> Net:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = meta_net()
    parallelize_module(model, mesh["tensor"], {"b": ColwiseParallel(), "c": RowwiseParallel()})
    fully_shard(model.low, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    model.to_empty(device="cpu")
    return model


def replicated(shape: tuple[int, ...]) -> Net:
    model = meta_net()
    model.to_empty(device="cpu")
    model.tied = model.a.bias  # to_empty() has made two tensors of them
    return model


@dataclass
class Plan:
    """A world to train in."""

    build: Callable[[tuple[int, ...]], Net]
    shape: tuple[int, ...]
    steps: int
    generation: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    batches: int = 1  # whose gradients are accumulated in each step
    norm: float | None = None  # to which gradients are clipped
    ends_in_forward: bool = False  # the last commit is made in the middle of a forward pass

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Outcome:
    """Content and results of a world, as one rank has seen them."""

    digest: int
    began_with: Tensors
    ended_with: Tensors
    losses: list[float]
    step: int
    commits: tuple[CommitId | None, CommitId | None]
    kept_by: list[str]
    bytes_read: int


def tensors_of(model: Net, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return all tensors, whole. A collective."""
    found = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = whole(value)
    return found


def train(plan: Plan) -> Callable[[GroupMember, FileStorage], Outcome]:
    def on_rank(member: GroupMember, storage: FileStorage) -> Outcome:
        state = TorchState(step=0)
        committer = committer_of(state)
        committer.use_storage(storage)
        committer.use_session(member)
        committer.resume()
        committer.start_from_line()
        state.sync()
        model, digest, seen = _train(plan, state, member)
        committer.detach()
        kept = weakref.ref(model)
        del model
        gc.collect()
        reader: Any = member.world.reader
        return Outcome(
            digest,
            *seen,
            state.step,
            state.commits,
            keepers(model) if (model := kept()) is not None else [],
            reader.bytes_read,
        )

    return on_rank


def _train(plan: Plan, state: Any, member: GroupMember) -> tuple[Any, int, tuple[Tensors, Tensors, list[float]]]:
    model = plan.build(plan.shape)
    optimizer = plan.optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01, **plan.options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state.attach(model=model, optimizer=optimizer, scheduler=scheduler, init=model.fill)
    began_with = tensors_of(model, optimizer)
    losses = []
    for _ in range(plan.steps):
        torch.manual_seed(state.step)
        for _ in range(plan.batches):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
        if plan.norm is not None:
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.norm)
            assert whole(norm) > plan.norm, "nothing was clipped"
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model.seen += 1
        state.step += 1
        losses.append(loss.item())
        state.commit()
    if plan.ends_in_forward:
        hook = model.b.register_forward_hook(lambda *_: state.commit())
        model(torch.randn(4, 6)).sum().backward()
        hook.remove()
    losses.append(optimizer.param_groups[0]["lr"])
    return model, member.attached[0][member.rank], (began_with, tensors_of(model, optimizer), losses)


def verified(
    build: Callable[[tuple[int, ...]], Net], shape: tuple[int, ...], damage: str = ""
) -> Callable[[GroupMember, FileStorage], str]:
    """Attach the values of a commit with ``--verify-sync``, and return the error. ``damage``: what the reshard does."""

    def on_rank(member: GroupMember, storage: FileStorage) -> str:
        member.verify_sync = True
        load = RestoreTargets.load

        def damaging(targets: RestoreTargets, when_opened: Callable[[], object] | None) -> None:
            load(targets, when_opened)
            local = targets.pieces["model.b.weight"].local.detach()
            if damage == "zero" and local.numel() and member.rank == 1:
                local.view(-1)[-1] = 0
            elif damage == "swap" and member.rank == 0:
                local[0], local[1] = local[1].clone(), local[0].clone()

        state, model = TorchState(step=0), build(shape)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        committer = committer_of(state)
        committer.use_storage(storage)
        committer.use_session(member)
        committer.start_from_line()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RestoreTargets, "load", damaging)
            try:
                committer.attach({"model": model, "optimizer": optimizer, "scheduler": scheduler}, model.fill)
            except StateDivergedError as error:
                return str(error)
        return ""

    return on_rank


def run(folder: Path, plan: Plan, before: list[Outcome] | None = None) -> list[Outcome]:
    """Train in a world that starts from the commits of the world ``before``, if there was one."""
    folder.mkdir(exist_ok=True)
    line = before[0].commits[0] if before else None
    return SERVER.in_world(folder, plan.size, plan.generation, train(plan), line, [o.digest for o in before or []])


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(value, right[name]) for name, value in left.items()
    )


SERVER = WorldServer()


@pytest.fixture(scope="module", autouse=True)
def _server(lasting_processes: set[int]) -> Iterator[None]:
    with SERVER:
        lasting_processes.add(SERVER.pid)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "first"


def continued(folder: Path, plan: Plan, before: list[Outcome]) -> list[Outcome]:
    """Train on from the commits of another world, in a copy of its folder."""
    other = folder.parent / f"{plan.shape} {plan.build.__name__}"
    shutil.copytree(folder, other)
    return run(other, plan, before)


def check_continued(before: list[Outcome], after: list[Outcome]) -> None:
    steps = len(after[0].losses) - 1
    for outcome in after:
        assert same(outcome.began_with, before[0].ended_with)
        assert outcome.step == before[0].step + steps
        assert outcome.kept_by == []
        assert outcome.losses == after[0].losses
        assert outcome.commits[0] == CommitId(2, steps)


def test_a_world_of_another_size_continues_with_the_same_tensors_and_losses(folder: Path) -> None:
    before = run(folder, Plan(fsdp, (3,), 3))
    assert all(same(outcome.ended_with, before[0].ended_with) for outcome in before)
    assert len({outcome.digest for outcome in before}) == 3
    undisturbed = run(folder.parent / "undisturbed", Plan(fsdp, (3,), 5))
    assert undisturbed[0].losses[:3] == before[0].losses[:3]
    for shape in ((2,), (3,), (4,)):
        after = continued(folder, Plan(fsdp, shape, 2, 2), before)
        check_continued(before, after)
        assert after[0].losses == pytest.approx(undisturbed[0].losses[3:], rel=1e-5)
        own = [outcome.bytes_read for outcome in after]
        if shape == (3,):
            assert own == [0, 0, 0], "each worker has its own shards"
            assert after[0].losses == undisturbed[0].losses[3:]
            assert same(after[0].ended_with, undisturbed[0].ended_with)


def test_a_commit_in_the_middle_of_a_forward_pass_holds_the_shards(folder: Path) -> None:
    before = run(folder, Plan(fsdp, (2,), 1, ends_in_forward=True))
    check_continued(before, continued(folder, Plan(fsdp, (3,), 1, 2), before))


def test_wrapped_blocks_accumulation_and_clipping(folder: Path) -> None:
    """The commits have the names of the parameters, whatever wraps their modules."""
    plan = Plan(fsdp_of_wrapped_blocks, (2,), 2, batches=2, norm=1e-3)
    before = run(folder, plan)
    names = {name for name, _ in meta_net().named_parameters(prefix="model")}
    assert before[0].commits[0] is not None
    header = FileCopies(folder).header(source(before[0].digest, 0, before[0].commits[0]).copy)
    assert names <= decode(header)[2].keys()
    undisturbed = run(folder.parent / "undisturbed", replace(plan, steps=3))
    after = continued(folder, replace(plan, shape=(3,), steps=1, generation=2), before)
    check_continued(before, after)
    assert after[0].losses == pytest.approx(undisturbed[0].losses[2:], rel=1e-5)


def test_verify_sync_detects_a_faulty_reshard(folder: Path) -> None:
    before = run(folder, Plan(fsdp, (2, 2), 1))
    digests = [outcome.digest for outcome in before]

    def errors(*attempt: Any) -> set[str]:
        other = folder.parent / str(attempt[1:])
        shutil.copytree(folder, other)
        return set(
            SERVER.in_world(other, torch.Size(attempt[1]).numel(), 2, verified(*attempt), before[0].commits[0], digests)
        )

    assert errors(fsdp_and_tensor_parallel, (1, 2)) == {""}
    assert errors(replicated, (1,)) == {""}
    for damage in ("zero", "swap"):
        (error,) = errors(fsdp, (3,), damage)
        assert "not those of the commit: model.b.weight. Report" in error


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Plan(fsdp, (2, 2), 2, options={"fused": True}), Plan(fsdp, (3,), 1, 2, options={"fused": True})),
        pytest.param(
            Plan(fsdp, (2,), 2, options={"foreach": False}),
            Plan(fsdp, (2, 2), 1, 2, options={"foreach": False}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan(fsdp_and_tensor_parallel, (2, 2), 2),
            Plan(fsdp_and_tensor_parallel, (1, 2), 1, 2),
            marks=pytest.mark.long,
        ),
        (Plan(fsdp_and_tensor_parallel, (1, 2), 2), Plan(fsdp, (3,), 1, 2)),
        pytest.param(Plan(replicated, (1,), 2), Plan(fsdp, (2,), 1, 2), marks=pytest.mark.long),
        (Plan(fsdp, (2,), 2), Plan(replicated, (1,), 1, 2)),
    ],
    ids=["HSDP to FSDP", "FSDP to HSDP", "FSDP and TP", "FSDP and TP to FSDP", "plain to FSDP", "FSDP to plain"],
)
def test_tensors_stay_the_same_between_meshes_of_other_shapes(folder: Path, old: Plan, new: Plan) -> None:
    before = run(folder, old)
    assert all(same(outcome.ended_with, before[0].ended_with) for outcome in before)
    after = continued(folder, new, before)
    check_continued(before, after)
    longer = run(folder.parent / "longer", replace(old, steps=3))
    assert after[0].losses[:-1] == pytest.approx(longer[0].losses[2:-1], rel=1e-4)
