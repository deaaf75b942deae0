"""Commits of a structure that this process has not built: parameter groups, layers, dtypes; and hooks that help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elasticstate.core.ids import CommitId
from elasticstate.errors import StateError, StateMisfitError
from elasticstate.state.base import State, committer_of
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState


def net_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))


def trained(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(1, 2, dtype=next(net.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def give(source: State, target: State) -> None:
    """Load the newest commit of a state into another one, as a sync does."""
    committer, snapshot = committer_of(target), committer_of(source).snapshot
    header, payload = snapshot.outgoing()
    private = snapshot.read_private(snapshot.newest or CommitId(0, 0))

    def load(targets: Callable[[], Any]) -> Any:
        committer.snapshot.incoming(header, private).copy_(payload)
        return committer.snapshot.load_incoming(targets())

    assert committer.receive(CommitId(0, 9), load)


def groups_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[list[str], float]]:
    names = {id(p): name for name, p in net.named_parameters()}
    return [([names[id(p)] for p in group["params"]], group["lr"]) for group in optimizer.param_groups]


def momenta(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[p]["momentum_buffer"].tolist() for name, p in net.named_parameters()}


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


FEWER: dict[str, Callable[[torch.nn.Sequential], torch.optim.Optimizer]] = {
    "one group": lambda net: sgd(net[2].parameters()),
    "another order": lambda net: sgd([{"params": list(net[i].parameters())} for i in (0, 2, 1)]),
    "one group of all": lambda net: sgd(net.parameters()),
    "moved parameters": lambda net: sgd([{"params": [net[2].bias, net[0].weight]}, {"params": [net[2].weight]}]),
    "more groups": lambda net: sgd([{"params": [p]} for p in net.parameters()]),
    "named": lambda net: sgd(net[2].named_parameters()),
}


@pytest.mark.parametrize("name", FEWER)
def test_groups_are_those_of_the_commit(name: str) -> None:
    net = net_of()
    optimizer = sgd(net[2].named_parameters() if name == "named" else net[2].parameters())
    for part, lr in ((net[1], 0.2), (net[0], 0.3)):
        params: Any = list(part.named_parameters() if name == "named" else part.parameters())
        optimizer.add_param_group({"params": params, "lr": lr})
    trained(net, optimizer)
    state = TorchState(net=net, optimizer=optimizer)
    state.commit()
    other = net_of(1)
    newcomer = TorchState(optimizer=FEWER[name](other), net=other)
    give(state, newcomer)
    assert groups_of(other, newcomer.optimizer) == groups_of(net, optimizer)
    assert momenta(other, newcomer.optimizer) == momenta(net, optimizer)
    trained(net, optimizer)
    trained(other, newcomer.optimizer)
    assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in other.parameters()]


def test_an_optimizer_that_overrides_its_state_dict_gets_its_groups_too() -> None:
    class Wrapped(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict()

    net = net_of()
    optimizer = Wrapped(net[2].parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.5})
    optimizer.add_param_group({"params": list(net[1].parameters()), "lr": 0.7})
    trained(net, optimizer)
    state = TorchState(net=net, optimizer=optimizer)
    state.commit()
    other = net_of(1)
    newcomer = TorchState(net=other, optimizer=Wrapped(other[2].parameters(), lr=0.1, momentum=0.9))
    give(state, newcomer)
    assert groups_of(other, newcomer.optimizer) == groups_of(net, optimizer)
    assert momenta(other, newcomer.optimizer) == momenta(net, optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_that_was_cast_is_cast_in_a_newcomer_and_back_by_a_restore(dtype: torch.dtype) -> None:
    net = net_of()
    optimizer = sgd(net.parameters())
    state = TorchState(net=net, optimizer=optimizer)
    state.commit()
    parameters = [*net.parameters()]
    net.to(dtype)
    state.restore()
    assert all(p is q and p.dtype == torch.float32 for p, q in zip(net.parameters(), parameters, strict=True))
    net.to(dtype)
    trained(net, optimizer)
    state.commit()
    other = net_of(1)
    newcomer = TorchState(net=other, optimizer=sgd(other.parameters()))
    give(state, newcomer)
    trained(net, optimizer)
    trained(other, newcomer.optimizer)
    assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in other.parameters()]
    assert {p.dtype for p in other.parameters()} == {dtype}


@pytest.mark.parametrize("in_commit", [True, False], ids=["in the commit", "here"])
def test_parameters_that_are_one_tensor_on_one_side_only_are_refused(in_commit: bool) -> None:
    """Both would be trained apart here, or get the content of one."""

    def square(is_tied: bool) -> torch.nn.Sequential:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        if is_tied:
            net[1].weight = net[0].weight
        return net

    source, target = TorchState(net=square(in_commit)), TorchState(net=square(not in_commit))
    source.commit()
    told = r"state\.net\.parameters\.0\.weight and state\.net\.parameters\.1\.weight are one tensor"
    with pytest.raises(StateMisfitError, match=told):
        give(source, target)
    grown = TorchState(net=square(not in_commit))
    grown.register_restore_pre_hook(lambda _: setattr(grown, "net", square(in_commit)))
    give(source, grown)
    assert (grown.net[0].weight is grown.net[1].weight) is in_commit


def test_hooks_get_the_plain_values_before_anything_is_loaded() -> None:
    net = net_of()
    state = TorchState(net=net, optimizer=sgd(net.parameters()), depth=3, table=torch.ones(2), notes=["a"])
    net.append(torch.nn.Linear(1, 1))
    state.depth = 4
    state.optimizer.add_param_group({"params": list(net[3].parameters())})
    state.commit()
    other = net_of(1)
    newcomer = TorchState(net=other, optimizer=sgd(other.parameters()), depth=3, table=torch.zeros(2), notes=[])
    seen = []

    def grow(values: dict[str, Any]) -> None:
        seen.append(values)
        while len(other) < values["depth"]:
            other.append(torch.nn.Linear(1, 1))
        del other[values["depth"] :]

    newcomer.register_restore_pre_hook(grow)
    newcomer.commit()
    give(state, newcomer)
    assert seen == [{"depth": 4, "notes": ["a"]}]
    assert [p.tolist() for p in net.parameters()] == [p.tolist() for p in other.parameters()]
    assert [len(group["params"]) for group in newcomer.optimizer.param_groups] == [6, 2]
    other.append(torch.nn.Linear(1, 1))
    newcomer.restore()
    assert len(other) == 4


def test_a_commit_that_fits_nothing_is_refused_by_name_and_stays() -> None:
    net = net_of()
    state = TorchState(net=net)
    state.commit()
    net.append(torch.nn.Linear(1, 1))
    with pytest.raises(StateMisfitError, match=r"commit \(0, 1\) is whole.*: 3\.bias, 3\.weight.*restore_pre_hook"):
        state.restore()
    assert state.commits[0] == CommitId(0, 1)
    del net[3]
    state.restore()


def test_an_error_of_a_hook_is_a_misfit_with_its_reason() -> None:
    state = TorchState(net=net_of())
    state.commit()
    state.register_restore_pre_hook(lambda values: values["absent"])
    with pytest.raises(StateMisfitError, match="KeyError: 'absent'"):
        state.restore()


def test_a_commit_of_an_optimizer_of_another_kind_is_refused() -> None:
    net = net_of()
    state = TorchState(net=net, optimizer=sgd(net.parameters()))
    state.optimizer = torch.optim.Adam(net.parameters())
    state.commit()
    state.optimizer = sgd(net.parameters())
    with pytest.raises(StateError, match=r"state\.optimizer is a SGD, .*has no momentum, dampening, nesterov"):
        state.restore()


def test_a_scheduler_with_functions_for_fewer_groups_is_refused() -> None:
    net = net_of()
    optimizer = sgd(net[2].parameters())
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    state = TorchState(net=net, optimizer=optimizer, scheduler=scheduler)
    state.commit()
    scheduler.lr_lambdas.append(lambda epoch: 0.5)
    with pytest.raises(StateError, match=r"functions for 2 parameter groups, and the commit for 1"):
        state.restore()


def test_damage_is_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TorchState(net=net_of())
    state.commit()
    state.commit()
    state.register_restore_pre_hook(lambda values: None)
    snapshot: Snapshot = committer_of(state).snapshot
    snapshot._newer.memory[snapshot._newer.frame.tensors] ^= 1
    state.restore()
    assert state.commits == (CommitId(0, 1), None)
