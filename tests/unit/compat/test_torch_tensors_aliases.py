"""Every way to write a tensor that torch does not count is detected before the write."""

from __future__ import annotations

import copy
import io
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticstate import compat
from elasticstate.compat import torch_tensors
from elasticstate.compat.torch_tensors import version_of

Way = Callable[[torch.Tensor], object]
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # without the collectives named "..._single"


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


def source_of_data(tensor: torch.Tensor) -> torch.Tensor:
    alias = torch.empty(0)
    alias.data = tensor
    return alias


UNCOUNTED: dict[str, Way] = {
    "data": lambda t: t.data.add_(1),
    "data of a view": lambda t: t.view(2, 2)[1:].data.add_(1),
    "data of a detached tensor": lambda t: t.detach().data.add_(1),
    "source of data": lambda t: source_of_data(t).add_(1),
    "numpy": lambda t: t.detach().numpy().__iadd__(1),
    "asarray": lambda t: memoryview(t.detach().__array__()).__setitem__(0, 5.0),
    "set_": lambda t: torch.empty(0).set_(t.detach()).add_(1),
    "storage": lambda t: t.untyped_storage().__setitem__(0, 7),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).add_(1),
    "capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).add_(1),
    "all_reduce": lambda t: dist.all_reduce(t),
    "broadcast": lambda t: dist.broadcast(t.detach(), 0),
    "reduce": lambda t: dist.reduce(t.detach(), 0),
    "group": lambda t: _world().allreduce([t.detach()]).wait(),
}
COUNTED: dict[str, Way] = {
    "add_": lambda t: t.add_(1),
    "item": lambda t: t.__setitem__(0, 5),
    "detach": lambda t: t.detach().add_(1),
    "view": lambda t: t.view(2, 2).add_(1),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "out": lambda t: torch.add(torch.ones(4), 1, out=t),
    "another parameter": lambda t: torch.nn.Parameter(t).add_(1),
    "subclass": lambda t: t.as_subclass(torch.Tensor).add_(1),
    "init": lambda t: torch.nn.init.zeros_(t),
}


def _world() -> Any:
    return dist.group.WORLD


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_write_that_torch_does_not_count_is_detected(name: str) -> None:
    tensor = parameter()
    watch = torch_tensors.watch([tensor])
    version = version_of(tensor)
    assert not torch_tensors.has_handles(watch)
    with torch.no_grad():
        UNCOUNTED[name](tensor)
    assert torch_tensors.has_handles(watch)
    if version_of(tensor) != version:
        pytest.fail("torch counts this write now: no detection is needed")


@pytest.mark.parametrize("name", COUNTED)
def test_torch_counts_all_other_writes(name: str) -> None:
    tensor = parameter()
    before = version_of(tensor)
    with torch.no_grad():
        COUNTED[name](tensor)
    assert version_of(tensor) != before


def test_a_handle_is_forgotten_when_it_is_gone() -> None:
    tensor, other = parameter(), parameter()
    watch = torch_tensors.watch([tensor, other])
    array = tensor.detach().numpy()
    assert not torch_tensors.forget_handles(watch, [tensor, other])
    assert not torch_tensors.is_only_owner(tensor)
    del array
    assert torch_tensors.has_handles(watch)
    assert torch_tensors.forget_handles(watch, [tensor, other])
    assert not torch_tensors.has_handles(watch)


def test_a_capsule_has_no_detectable_end() -> None:
    tensor = parameter()
    watch = torch_tensors.watch([tensor])
    torch.utils.dlpack.to_dlpack(tensor.detach())
    assert not torch_tensors.forget_handles(watch, [tensor])
    assert not torch_tensors.is_only_owner(tensor)


def test_a_new_storage_at_the_address_of_a_capsule_has_no_handle() -> None:
    memory = np.ones(4, dtype=np.float32)  # so that both storages have the same address
    old = torch.from_numpy(memory)
    torch_tensors.watch([old])
    capsule = torch.utils.dlpack.to_dlpack(old)
    address = old.data_ptr()
    del old
    assert not torch_tensors.is_only_owner(torch.from_numpy(memory)), "the capsule keeps the old storage"
    del capsule
    new = torch.from_numpy(memory)
    assert torch_tensors.is_only_owner(new)
    assert torch_tensors.forget_handles(torch_tensors.watch([new]), [new])
    assert address not in torch_tensors._lasting, "something is kept of the old storage"


def test_only_the_newest_watch_is_valid() -> None:
    tensor = parameter()
    first = torch_tensors.watch([tensor])
    second = torch_tensors.watch([tensor])
    assert torch_tensors.has_handles(first)
    assert not torch_tensors.forget_handles(first, [tensor])
    assert not torch_tensors.has_handles(second)


def test_other_memory_of_the_same_tensor_is_detected() -> None:
    tensor = parameter()
    watch = torch_tensors.watch([tensor])
    tensor.data = torch.zeros(4)
    assert not torch_tensors.forget_handles(watch, [tensor])


def test_handles_from_before_are_counted() -> None:
    tensor = parameter()
    assert torch_tensors.is_only_owner(tensor)
    alias = tensor.data
    assert not torch_tensors.is_only_owner(tensor)
    del alias
    assert torch_tensors.is_only_owner(tensor)
    assert not torch_tensors.is_only_owner(torch.ones(4).share_memory_())


def test_training_asks_for_no_handles() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = 0
    for _ in range(3):
        ddp(torch.ones(3, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch = watch or torch_tensors.watch(model.parameters())
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        assert all(map(torch_tensors.is_only_owner, [*model.parameters(), *state]))
    assert not torch_tensors.has_handles(watch)


def test_replaced_attributes_behave_as_before() -> None:
    tensor = parameter()
    torch_tensors.watch([tensor])
    assert type(tensor.data) is torch.Tensor
    assert not tensor.data.requires_grad
    assert torch.equal(copy.deepcopy(tensor), tensor)
    file = io.BytesIO()
    torch.save({"p": tensor}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["p"], tensor)
    with pytest.raises(RuntimeError, match="requires grad"):
        tensor.numpy()
    with pytest.raises(RuntimeError):
        del tensor.data

    class Kind(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Kind).data) is Kind


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_replaced_attributes_can_be_compiled(backend: str) -> None:
    torch_tensors.watch([parameter()])

    def double(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.data.mul_(2)
        return x + 1

    found = torch.compile(double, backend=backend, fullgraph=True)(torch.ones(3))
    assert found.tolist() == [3, 3, 3]


@pytest.mark.parametrize(("version", "works"), [("2.10.0", False), ("2.11.0+cu130", True), ("2.15.1", True)])
def test_tick_records_are_off_with_a_torch_that_was_not_checked(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "_installed", lambda library: version)
    compat.warn_unchecked.cache_clear()
    with caplog.at_level(logging.WARNING, "elasticstate"):
        assert [torch_tensors.can_watch() for _ in range(2)] == [works, works]
    compat.warn_unchecked.cache_clear()
    expected = f"checked with torch 2.11 to 2.15, and not with {version}, so a failure repeats the steps"
    assert [expected in record.getMessage() for record in caplog.records] == [True] * (not works)


def test_the_names_exist() -> None:
    assert torch_tensors.can_watch()
    missing = [name for name in torch_tensors._COLLECTIVES if not hasattr(dist.ProcessGroup, name)]
    assert not [name for name in missing if not IS_OLD or "_single" not in name]


def test_a_tick_that_another_thread_ends_inside_the_call_of_a_collective_does_not_forget_it() -> None:
    tensor = parameter()
    watch = torch_tensors.watch([tensor])
    forgotten: list[bool] = []
    call = torch_tensors._noting_work(lambda *_: forgotten.append(torch_tensors.forget_handles(watch, [tensor])))
    call(None, [tensor.detach()])
    assert forgotten == [False]
    assert torch_tensors.has_handles(watch)
    assert torch_tensors.forget_handles(watch, [tensor]), "the call is over"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_collective_that_was_waited_for_keeps_no_tensors(is_async: bool) -> None:
    torch_tensors.watch([parameter()])
    output = torch.empty(4)
    reduce_scatter: Any = dist.reduce_scatter_tensor if IS_OLD else dist.reduce_scatter_single
    work = reduce_scatter(output, torch.ones(4), async_op=is_async)
    if work is not None:
        work.wait()
    output_exists = weakref.ref(output)
    del output, work
    assert output_exists() is None, "torch's work object of a reduce-scatter keeps it, and is never completed"


def test_tensors_without_memory_of_their_own_have_no_address() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
    assert fake.is_cpu
    assert torch_tensors._storage_address(fake) is None
    assert torch_tensors._storage_address(torch.empty(2)) is not None
    assert torch_tensors._storage_address(torch.nn.Parameter(torch.empty(2))) is not None
