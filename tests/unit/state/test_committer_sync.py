from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.state import rng, session as channel_module
from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.divergence import find_refused
from elasticstate.state.torch import TorchState


def trained(seed: int, steps: int, hidden: int = 6) -> TorchState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=seed, log=[seed])
    train(state, steps)
    return state


def train(state: TorchState, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.linspace(-1, 1, 32).view(8, 4) * (state.epoch + 1)
        state.optimizer.zero_grad()
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.scheduler.step()
        state.epoch += 1
        state.log.append(state.epoch)


def content(state: TorchState) -> tuple[bytes, str]:
    """Return all tensors bit by bit, and all other values."""
    tensors = [*state.model.parameters(), *state.model.buffers()]
    tensors += [t for p in state.model.parameters() for t in state.optimizer.state.get(p, {}).values()]
    objects = (
        [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.state_dict()["param_groups"]],
        sorted(state.scheduler.state_dict().items()),
        state.epoch,
        state.log,
    )
    return b"".join(t.detach().numpy().tobytes() for t in tensors), repr(
        [sorted(g.items()) for g in objects[0]] + list(objects[1:])
    )


def joined(states: list[Any], world: Any, member: Any) -> list[Any]:
    members = [member(world, rank) for rank in range(len(states))]
    for state, session in zip(states, members, strict=True):
        committer_of(state).use_session(session)
    return members


def test_in_the_first_world_all_become_rank_0(world: Any, member: Any, together: Any) -> None:
    states = [trained(seed, steps) for seed, steps in enumerate((0, 3, 0))]
    first = content(states[0])
    members = joined(states, world(3, lacking=(1, 2)), member)
    together(*[state.sync for state in states])
    assert [content(state) for state in states] == [first] * 3
    assert [state.commits for state in states] == [(CommitId(1, 0), None)] * 3
    assert [m.commits[-1] for m in members] == [(CommitId(1, 0), None)] * 3
    assert all(p.grad is None for state in states for p in state.model.parameters())


def test_a_newcomer_gets_all_of_the_roots_commit_and_goes_on_bitwise_equal(
    world: Any, member: Any, together: Any
) -> None:
    """With weight decay and a schedule. FACTS of the reference: 1 (its commit), 2 (a step), 3 (the learning rate)."""
    root, newcomer = trained(0, 5), trained(1, 0)
    committer_of(root).use_session(member(world(1)))
    root.sync()
    root.commit()
    committed = content(root)
    members = joined([root, newcomer], world(2, generation=2, lacking=(1,)), member)
    together(root.sync, newcomer.sync)
    assert content(newcomer) == content(root) == committed
    assert newcomer.commits == (CommitId(2, 0), None)
    assert root.commits == (CommitId(2, 0), CommitId(1, 0))
    train(root, 3)
    train(newcomer, 3)
    assert content(newcomer) == content(root) != committed
    newcomer.restore()
    assert content(newcomer) == committed, "its own commit is the root's state, not what it was born with"
    assert members[0].sent == members[1].sent
    assert members[1].sent[0] > 2 * 4 * 50


def test_the_commit_is_sent_not_what_came_after_it(world: Any, member: Any, together: Any) -> None:
    root, newcomer = trained(0, 2), trained(1, 0)
    committer_of(root).use_session(member(world(1)))
    root.commit()
    committed = content(root)
    joined([root, newcomer], world(2, generation=2, lacking=(1,)), member)
    train(root, 1)
    together(root.sync, newcomer.sync)
    assert content(newcomer) == committed


def test_only_root_and_lacking_take_part_and_all_restamp(world: Any, member: Any, together: Any) -> None:
    """Four members, root 1; rank 3 lacks the state."""
    states = [trained(0, 2) for _ in range(3)] + [trained(9, 0)]
    for state in states[:3]:
        committer_of(state).use_session(member(world(3)))
        state.commit()
    committed = content(states[1])
    members = joined(states, world(4, generation=7, root=1, lacking=(3,)), member)
    together(*[state.sync for state in states])
    assert [m.groups for m in members] == [[], [(1, 3)], [], [(1, 3)]]
    assert [content(state) for state in states] == [committed] * 4
    assert [state.commits for state in states] == [(CommitId(7, 0), None)] * 4
    assert all(p.grad is None for state in states for p in state.model.parameters())
    for state in states:
        state.restore()
    assert [content(state) for state in states] == [committed] * 4
    assert [len(m.sent) for m in members] == [0, 1, 0, 1]


def test_a_root_behind_the_lacking_in_rank_is_found(world: Any, member: Any, together: Any) -> None:
    states = [trained(1, 0), trained(2, 0), trained(0, 3)]
    expected = content(states[2])
    committer_of(states[2]).use_session(member(world(1)))
    states[2].commit()
    joined(states, world(3, generation=2, root=2, lacking=(0, 1)), member)
    together(*[state.sync for state in states])
    assert [content(state) for state in states] == [expected] * 3


def test_where_nobody_lacks_it_nothing_moves_and_ids_stay(world: Any, member: Any) -> None:
    states = [trained(0, 1), trained(0, 1)]
    for state in states:
        committer_of(state).use_session(member(world(2)))
        state.commit()
    members = joined(states, world(2, generation=2), member)
    for state in states:
        state.sync()
    assert [m.groups + m.sent + m.commits for m in members] == [[], []]
    assert [state.commits[0] for state in states] == [CommitId(1, 1)] * 2


def test_a_world_of_one_has_a_commit_from_the_beginning(world: Any, member: Any) -> None:
    state = ObjectState(n=1)
    committer_of(state).use_session(member(world(1)))
    state.sync()
    state.n = 2
    state.restore()
    assert (state.n, state.commits) == (1, (CommitId(1, 0), None))


@pytest.mark.parametrize("n_tensors", [1, 300])
def test_the_number_of_collectives_does_not_depend_on_the_number_of_tensors(
    n_tensors: int, world: Any, member: Any, together: Any
) -> None:
    states = [TorchState(**{f"t{i}": torch.full((10,), float(rank)) for i in range(n_tensors)}) for rank in range(2)]
    members = joined(states, world(2, lacking=(1,)), member)
    together(*[state.sync for state in states])
    assert [len(m.collectives) for m in members] == [3, 3]
    assert sum(members[1].collectives[2:]) == members[1].sent[0]
    assert all(getattr(states[1], f"t{i}").tolist() == [0.0] * 10 for i in range(n_tensors))


def test_what_is_larger_than_a_chunk_goes_in_several(
    world: Any, member: Any, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "CHUNK_BYTES", 1000)
    states = [TorchState(t=torch.arange(1000.0) * (1 - rank)) for rank in range(2)]
    members = joined(states, world(2, lacking=(1,)), member)
    together(*[state.sync for state in states])
    assert torch.equal(states[1].t, torch.arange(1000.0))
    assert len(members[1].collectives) == 2 + -(-members[1].sent[0] // 1000)


def test_a_second_sync_in_a_generation_does_nothing(world: Any, member: Any, together: Any) -> None:
    states = [ObjectState(n=rank) for rank in range(2)]
    members = joined(states, world(2, lacking=(1,)), member)
    together(*[state.sync for state in states])
    for state in states:
        state.commit()
        state.sync()
    assert [m.groups for m in members] == [[(0, 1)]] * 2
    assert [state.commits[0] for state in states] == [CommitId(1, 1)] * 2


def test_a_newcomers_random_state_is_its_own_and_a_holder_keeps_its_own(world: Any, member: Any, together: Any) -> None:
    states = [ObjectState(n=rank) for rank in range(3)]
    members = joined(states, world(3, lacking=(1, 2)), member)
    torch.manual_seed(1234)
    random.seed(5)
    np.random.seed(6)
    before = rng.capture()
    together(*[state.sync for state in states])
    private = [committer_of(state).snapshot.read_private(CommitId(1, 0)) for state in states]
    assert private[0] == before
    assert private[1:] == [rng.derived(1234, members[rank].worker_key, 1) for rank in (1, 2)]
    assert len(set(private)) == 3


def test_with_callbacks_everybody_seals_what_they_made(world: Any, member: Any, together: Any) -> None:
    states = [ObjectState(n=1, size=2) for _ in range(2)]
    for state in states:
        committer_of(state).use_session(member(world(2)))
        state.commit()
    states.append(ObjectState(n=99, size=0))
    for state in states:
        state.register_reset_callbacks([lambda s=state: setattr(s, "size", committer_of(s).session.view.size)])
    joined(states, world(3, generation=2, lacking=(2,)), member)
    for state in states[:2]:  # in a worker's first world, callbacks do not run
        state.on_reset()
    together(*[state.sync for state in states])
    assert [state.commits[0] for state in states] == [CommitId(2, 0)] * 3
    for state in states:
        state.size = 0
        state.restore()
    assert [(state.n, state.size) for state in states] == [(1, 3)] * 3


def test_with_callbacks_and_nobody_lacking_all_seal_without_a_collective(world: Any, member: Any) -> None:
    states = [ObjectState(size=3) for _ in range(2)]
    for state in states:
        committer_of(state).use_session(member(world(3)))
        state.commit()
        state.register_reset_callbacks([lambda s=state: setattr(s, "size", committer_of(s).session.view.size)])
    members = joined(states, world(2, generation=2), member)
    for state in states:
        state.on_reset()
        state.sync()
    assert [(state.size, state.commits) for state in states] == [(2, (CommitId(2, 0), CommitId(1, 1)))] * 2
    assert [m.groups for m in members] == [[], []]

    joined(states, world(2, generation=3), member)
    for state in states:
        state.sync()
    assert [state.commits[0] for state in states] == [CommitId(2, 0)] * 2, "what they made is sealed once"
    for state in states:
        state.size = 0
        state.restore()
    assert [state.size for state in states] == [2, 2]


def test_a_laggards_old_commits_are_gone_after_sync(world: Any, member: Any, together: Any) -> None:
    """The laggard's commits are not on the job's line: the other members have rolled back behind them."""
    root, laggard = ObjectState(n=1), ObjectState(n=2)
    committer_of(root).use_session(member(world(2, generation=5)))
    committer_of(laggard).use_session(member(world(2, generation=5), 1))
    root.commit()
    for _ in range(3):
        laggard.commit()
    members = joined([root, laggard], world(2, generation=6, lacking=(1,)), member)
    together(root.sync, laggard.sync)
    assert laggard.commits == members[1].commits[-1] == (CommitId(6, 0), None)
    laggard.restore()
    assert laggard.n == 1


def test_a_sync_that_fails_on_the_way_leaves_the_newcomer_as_it_was(world: Any, member: Any, together: Any) -> None:
    """The root fails after it has sent the header."""
    root, laggard = ObjectState(n=1, big=torch.ones(1000)), ObjectState(n=2, big=torch.zeros(1000))
    for rank, state in enumerate((root, laggard)):
        committer_of(state).use_session(member(world(2), rank))
        state.commit()
        state.commit()
    before = laggard.commits
    members = joined([root, laggard], world(2, generation=2, lacking=(1,)), member)
    with pytest.raises(RuntimeError):
        together(lambda: send_the_header_only(root, members[0]), laggard.sync)
    assert laggard.n == 2
    assert laggard.big.unique().tolist() == [0]
    assert before == (CommitId(1, 2), CommitId(1, 1))
    assert laggard.commits == members[1].commits[-1] == (CommitId(1, 2), None)
    laggard.restore()
    assert laggard.n == 2


def send_the_header_only(state: Any, session: Any) -> None:
    send_in_part(state, session, chunks=0)


def send_in_part(state: Any, session: Any, chunks: int) -> None:
    """Send a part of the commit, like a root that dies during the sync."""
    header, payload = committer_of(state).snapshot.outgoing()
    channel = channel_module.Channel(session.process_group_for((0, 1)), 0)
    assert find_refused(channel, (0, 1), 0, state._value_kinds(), has_commit=True) == {}
    channel.send(msgspec.msgpack.encode((0, header)))
    channel.broadcast(payload[: chunks * channel_module.CHUNK_BYTES])


@pytest.mark.parametrize("holds", [False, True])
def test_a_sync_that_fails_half_way_changes_nothing_and_is_done_again(
    holds: bool, world: Any, member: Any, together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer may be the next root, if the job has not committed yet. A laggard may hold the last commit."""
    monkeypatch.setattr(channel_module, "CHUNK_BYTES", 1000)
    root, newcomer = (ObjectState(big=torch.full((1000,), float(rank))) for rank in range(2))
    committer_of(root).use_session(member(world(1)))
    committer_of(newcomer).use_session(member(world(1)))
    root.commit()
    if holds:
        newcomer.commit()
    members = joined([root, newcomer], world(2, generation=2, lacking=(1,)), member)
    with pytest.raises(RuntimeError):
        together(lambda: send_in_part(root, members[0], chunks=3), newcomer.sync)
    assert newcomer.commits == ((CommitId(1, 1), None) if holds else (None, None))
    assert newcomer.big.unique().tolist() == [1.0]
    joined([root, newcomer], world(2, generation=3, lacking=(1,)), member)
    together(root.sync, newcomer.sync)
    assert newcomer.big.unique().tolist() == [0.0]
    assert newcomer.commits == (CommitId(3, 0), None)


def test_what_is_received_is_written_in_place(world: Any, member: Any, together: Any) -> None:
    root, newcomer = trained(0, 2), trained(1, 2)
    committer_of(root).use_session(member(world(1)))
    root.commit()
    expected = content(root)
    tensors = [*newcomer.model.parameters(), *newcomer.optimizer.state[newcomer.model[0].weight].values()]
    joined([root, newcomer], world(2, generation=2, lacking=(1,)), member)
    together(root.sync, newcomer.sync)
    after = [*newcomer.model.parameters(), *newcomer.optimizer.state[newcomer.model[0].weight].values()]
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    assert content(newcomer) == expected


@pytest.mark.parametrize("more", [-channel_module.FIRST_BYTES, -9, -8, -7, 1, 100_000])
def test_a_message_of_any_length_arrives(more: int, world: Any, member: Any, together: Any) -> None:
    """A length of 8 bytes goes before the message."""
    message = random.Random(more).randbytes(max(0, channel_module.FIRST_BYTES + more))
    one_world, received = world(2), []
    members = [member(one_world, rank) for rank in range(2)]
    channels = [lambda m=m: channel_module.Channel(m.process_group_for((0, 1)), 0) for m in members]
    together(lambda: channels[0]().send(message), lambda: received.append(channels[1]().receive()))
    assert received == [message]
    assert [len(m.collectives) for m in members] == [1 if more <= -8 else 2] * 2
