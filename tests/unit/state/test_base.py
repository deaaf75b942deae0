from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.join import Join

from elasticstate import present_world
from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.errors import HostsUpdatedInterrupt, StateError, UsageError
from elasticstate.options import WorkerEnvironment
from elasticstate.state.base import ObjectState, State, committer_of
from elasticstate.state.torch import TorchState


class Counter(State):
    """A state class that only defines capture and apply."""

    def __init__(self, n: int) -> None:
        super().__init__(n=n)
        self._table = torch.zeros(n)

    def capture(self) -> dict[str, Any]:
        return {"n": self.n, "table": self._table}

    def apply(self, values: Any) -> None:
        self.n = values["n"]
        self._table.copy_(values["table"])


def test_a_name_that_was_not_given_raises_and_names_those_that_were() -> None:
    state = ObjectState(epoch=0, batch=1)
    for access in (lambda: state.bacth, lambda: setattr(state, "bacth", 2)):
        with pytest.raises(AttributeError, match=r"ObjectState has no value 'bacth'\. Did you mean state\.batch\?"):
            access()
    with pytest.raises(
        AttributeError, match=r"has no value 'rate'\. Use a name .* \(epoch, batch\), or give it 'rate'"
    ):
        _ = state.rate
    state.batch = 7
    assert state.batch == 7
    assert not hasattr(state, "bacth")


@pytest.mark.parametrize("name", ["state_dict", "parameters"])
def test_a_method_of_a_value_is_named_with_the_value(name: str) -> None:
    state = TorchState(step=0, model=torch.nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=rf"no value '{name}'\. 'model' has it: use state\.model\.{name}\."):
        getattr(state, name)


def test_a_method_and_a_similar_name_are_both_named() -> None:
    model = torch.nn.Linear(1, 1)
    state = TorchState(stepp=0, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(
        AttributeError,
        match=r"no value 'step'\. 'optimizer' has it: use state\.optimizer\.step\. Did you mean state\.stepp\? To add",
    ):
        state.step += 1


@pytest.mark.parametrize("kind", [ObjectState, TorchState])
def test_what_belongs_to_one_world_is_refused(kind: Any) -> None:
    """To load it, torch needs a process group, and there is none when a state is restored."""
    hook = PowerSGDState(process_group=None)
    for value, verb in ((hook, "is"), ([1, hook], "contains"), ({"of": hook}, "contains")):
        with pytest.raises(
            UsageError, match=rf"state\.hook {verb} a PowerSGDState, which belongs to one world\. Creat"
        ):
            kind(hook=value)


@pytest.mark.parametrize("name", ["commit", "_hidden", "capture", "two words"])
def test_names_that_would_hide_something_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' cannot be the name of a value of ObjectState"):
        ObjectState(**{name: 1})


def test_a_state_of_ones_own_is_committed_and_restored() -> None:
    state = Counter(3)
    state._table.fill_(2)
    state.commit()
    state._table.fill_(5)
    state.n = 99
    state.restore()
    assert (state.n, state._table.tolist()) == (3, [2, 2, 2])


def test_an_apply_that_keeps_the_commits_memory_is_found_out() -> None:
    class Careless(Counter):
        def apply(self, values: Any) -> None:
            self.n = values["n"]
            self._table = values["table"]

    state = Careless(3)
    state.commit()
    with pytest.raises(StateError, match=r"Careless\.apply\(\) kept 'table', which is memory of the commit"):
        state.restore()


def test_outside_a_world_commits_are_numbered_and_sync_is_a_save() -> None:
    state = ObjectState(n=0)
    assert state.commits == (None, None)
    state.sync()
    state.commit()
    state.check_host_updates()
    state.save()
    assert state.commits == (CommitId(0, 3), CommitId(0, 2))


def test_without_a_commit_there_is_nothing_to_restore() -> None:
    with pytest.raises(StateError, match="holds no commit to restore"):
        ObjectState(n=0).restore()


@pytest.mark.parametrize(("every", "saved"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (8, [])])
def test_commit_every_saves_by_count_and_ticks_always(every: int, saved: list[int], member: Any, world: Any) -> None:
    session = member(world(1, generation=4))
    state = ObjectState(n=0)
    committer_of(state).use_session(session)
    for _ in range(7):
        state.commit(every=every)
    assert session.ticks == 7
    assert [commit for commit, _ in session.commits] == [CommitId(4, tick) for tick in saved]


@pytest.mark.parametrize("every", [0, -1])
def test_commit_every_less_than_one_is_refused(every: int) -> None:
    state = ObjectState(n=0)
    with pytest.raises(UsageError, match=rf"commit\(every={every}\): must be at least 1"):
        state.commit(every=every)
    assert committer_of(state).session.ticks == 0


def test_the_save_comes_before_the_tick_that_interrupts(member: Any, world: Any) -> None:
    session = member(world(1, generation=2), end_at=2)
    state = ObjectState(n=0)
    committer_of(state).use_session(session)
    state.commit()
    state.n = 5
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert state.commits == (CommitId(2, 2), CommitId(2, 1))
    state.n = 6
    state.restore()
    assert state.n == 5


def test_an_id_has_one_content(member: Any, world: Any) -> None:
    state = ObjectState(n=0)
    committer_of(state).use_session(member(world(1, generation=2)))
    committer_of(state).seal(CommitId(2, 3))
    for older in (CommitId(2, 3), CommitId(2, 2), CommitId(1, 9)):
        with pytest.raises(StateError, match=r"is not newer than \(2, 3\)"):
            committer_of(state).seal(older)
    assert state.commits == (CommitId(2, 3), None)


def test_a_capture_that_fails_costs_no_commit_and_ends_no_tick(member: Any, world: Any) -> None:
    session = member(world(1))
    state = ObjectState(n=0, extra=None)
    committer_of(state).use_session(session)
    state.commit()
    state.n, state.extra = 1, threading.Lock()
    with pytest.raises(StateError, match=r"state\.extra"):
        state.commit()
    assert session.ticks == 1
    assert state.commits == (CommitId(1, 1), None)
    assert session.commits[-1] == state.commits, "the session knows what is held"
    state.restore()
    assert (state.n, state.extra) == (0, None)


def test_random_state_belongs_to_the_commit() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    state = ObjectState(n=0)
    state.commit()
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_binding_forgets_what_was_committed_outside_a_world(member: Any, world: Any) -> None:
    state = ObjectState(n=0)
    state.commit()
    committer_of(state).use_session(member(world(1)))
    assert state.commits == (None, None), "all ranks have a (0, 1), each with its own content"


def test_a_worker_of_elasticrun_commits_nothing_outside_a_world(
    member: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would train a model of its own, and the job would end with status 0."""
    told = WorkerEnvironment(
        "socket", "mark", WorkerId("localhost", 0, 1), "job", "id", "127.0.0.1", "commits", (15,), "gloo"
    )
    for name, value in told.variables().items():
        monkeypatch.setenv(name, value)
    state = ObjectState(n=0)
    for call in (state.commit, state.save, state.sync, state.check_host_updates, lambda: state.commit(every=2)):
        with pytest.raises(UsageError, match=r"outside .* @elasticstate\.run, .* pass this state to the function"):
            call()
    assert state.commits == (None, None)
    committer_of(state).use_session(member(world(1)))
    state.commit()
    assert state.commits == (CommitId(1, 1), None)


def test_an_empty_torch_state_warns() -> None:
    with pytest.warns(UserWarning, match=r"TorchState\(\) has no values: .*TorchState\(model=model") as warned:
        TorchState()
    assert warned[0].filename == __file__, "the line that is to be changed"


def test_a_torch_state_that_captures_by_itself_may_have_no_values() -> None:
    class Own(TorchState):
        def capture(self) -> dict[str, Any]:
            return {"x": 1}

    Own()


def test_reset_callbacks_run_in_order() -> None:
    calls: list[str] = []
    state = ObjectState(n=0)
    state.register_reset_callbacks([lambda: calls.append("a"), lambda: calls.append("b")])
    state.register_reset_callbacks([lambda: calls.append("c")])
    state.on_reset()
    assert calls == ["a", "b", "c"]


def test_what_callbacks_made_and_a_restore_undid_is_not_sealed(member: Any, world: Any) -> None:
    session = member(world(1))
    state = ObjectState(n=1)
    committer_of(state).use_session(session)
    state.commit()
    state.register_reset_callbacks([lambda: setattr(state, "n", 2)])
    session.world = world(1, generation=2)
    state.on_reset()
    assert state.n == 2
    state.restore()
    session.world = world(1, generation=3)
    state.sync()
    assert (state.n, state.commits) == (1, (CommitId(1, 1), None))


def test_a_state_that_comes_first_in_a_join_context_is_refused() -> None:
    state = ObjectState(step=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"Join\(\[ddp_model, state\]\)"), Join([state]):
            state.commit()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "make",
    [
        lambda: open(os.devnull, "a"),  # noqa: SIM115
        lambda: open(__file__),  # noqa: SIM115
        lambda: contextlib.nullcontext(threading.Lock()),
        lambda: contextlib.nullcontext(step for step in range(3)),
    ],
)
def test_a_value_that_can_never_be_committed_is_refused_before_the_first_world(
    make: Callable[[], AbstractContextManager[object]],
) -> None:
    """In the world only the root would commit, and the other ranks would try again."""
    with make() as value, pytest.raises(StateError, match=r"state\.mine cannot be committed, .* cannot be pickled"):
        ObjectState(mine=value, step=0)._require_picklable()


def test_values_whose_pickling_needs_a_world_are_not_refused() -> None:
    class OfTheWorld:
        def __reduce__(self) -> tuple[object, ...]:
            return int, (present_world.rank(),)

    ObjectState(mine=OfTheWorld(), call=lambda: 1, step=0)._require_picklable()
    TorchState(model=torch.nn.Linear(1, 1), step=0)._require_picklable()
