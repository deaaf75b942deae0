"""Commits that outlive the process that made them: a new worker finds and verifies them, and drops damaged ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elasticstate.core.ids import CommitId
from elasticstate.errors import CommitStorageError, StateError, StateMisfitError
from elasticstate.state.base import ObjectState, committer_of
from elasticstate.state.session import HeldCommits
from elasticstate.state.snapshot import Snapshot
from elasticstate.state.torch import TorchState
from tests.kit.state import read_commit

CommitStorage = Callable[..., Any]


def model_state(seed: int, storage: Any) -> TorchState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    state = TorchState(model=model, optimizer=torch.optim.AdamW(model.parameters()), epoch=0)
    committer_of(state).use_storage(storage)
    return state


def train(state: TorchState) -> None:
    state.model(torch.ones(2, 4)).square().sum().backward()
    state.optimizer.step()
    state.epoch += 1


def content(state: TorchState) -> tuple[list[Any], int]:
    tensors = [*state.model.parameters(), *(t for s in state.optimizer.state.values() for t in s.values())]
    return [t.tolist() for t in tensors], state.epoch


def two_commits(storage: Any) -> list[Any]:
    """Make two commits, as a worker that is gone now. Return the content of each."""
    state, found = model_state(0, storage), []
    for _ in range(2):
        train(state)
        state.commit()
        found.append((content(state), torch.get_rng_state().tolist()))
        torch.rand(1)
    return found


def damage(file: Any, at: int = -1, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= bit
    file.write_bytes(content)


def test_a_new_worker_holds_what_the_last_one_sealed_and_resumes_from_it(file_storage: CommitStorage) -> None:
    _, (last, random_state) = two_commits(file_storage())
    state = model_state(1, file_storage())
    assert state.commits == (CommitId(0, 2), CommitId(0, 1))
    parameters = [*state.model.parameters()]
    assert content(state) != last
    assert committer_of(state).resume()
    assert content(state) == last
    assert torch.get_rng_state().tolist() == random_state
    assert [*map(id, state.model.parameters())] == [*map(id, parameters)], "in place"
    train(state)
    committer_of(state).session.record_commits(HeldCommits(*state.commits, state.commit_bytes, lambda: 0))
    state.commit()
    assert state.commits == (CommitId(0, 3), CommitId(0, 2))
    assert Snapshot(file_storage()).newest == CommitId(0, 3)


def test_nothing_is_resumed_from_where_nothing_is(file_storage: CommitStorage) -> None:
    assert not committer_of(model_state(0, file_storage())).resume()
    assert model_state(0, file_storage()).commits == (None, None)


def test_commits_made_in_private_memory_are_forgotten(file_storage: CommitStorage) -> None:
    state = ObjectState(n=0)
    state.commit()
    committer_of(state).use_storage(file_storage())
    assert state.commits == (None, None)


def test_a_commit_of_another_owner_is_not_claimed(file_storage: CommitStorage) -> None:
    two_commits(file_storage(b"another job.ooo."))
    state = model_state(1, file_storage())
    assert state.commits == (None, None)
    assert not committer_of(state).resume()
    assert Snapshot(file_storage(b"another job.ooo.")).newest == CommitId(0, 2), "and it is left alone"


def test_a_commit_of_another_layout_than_the_seals_is_not_claimed(
    file_storage: CommitStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """The buffer of a seal contains another valid file."""
    storage = file_storage()
    for width, tick in ((3, 1), (4, 2)):
        Snapshot(storage).write({"x": torch.ones(width)}, b"", CommitId(1, tick))
    one, other = (file.read_bytes() for file in storage.files)
    storage.files[0].write_bytes(other)
    storage.files[1].write_bytes(one)
    assert (Snapshot(file_storage()).newest, Snapshot(file_storage()).previous) == (None, None)
    warning = "discarded damaged commit (1, 2) (buffer 1): the buffer does not contain the commit that was sealed"
    assert warning in caplog.text


def test_a_buffer_that_is_shorter_than_its_seal_says_is_no_commit(file_storage: CommitStorage) -> None:
    storage = file_storage()
    two_commits(storage)
    storage.files[1].write_bytes(storage.files[1].read_bytes()[:100])
    snapshot = Snapshot(file_storage())
    assert (snapshot.newest, snapshot.previous) == (CommitId(0, 1), None)
    storage.files[0].write_bytes(b"")
    assert Snapshot(file_storage()).newest is None


def newest_file(storage: Any) -> Any:
    """Return the file that holds the second of two commits."""
    return storage.files[Snapshot(storage)._newer.index]


def inside_the_weights(storage: Any) -> int:
    return Snapshot(storage)._newer.frame.tensors + 5


def test_a_damaged_commit_is_given_up_for_the_one_before_it(
    file_storage: CommitStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage = file_storage()
    (first, _), _ = two_commits(storage)
    damage(newest_file(storage), inside_the_weights(storage))
    state = model_state(1, file_storage())
    assert state.commits == (CommitId(0, 2), CommitId(0, 1)), "nobody has looked at the bytes yet"
    assert committer_of(state).resume()
    assert content(state) == first
    assert state.commits == (CommitId(0, 1), None)
    assert "discarded damaged commit (0, 2) (buffer 1): its checksum is wrong" in caplog.text
    assert Snapshot(file_storage()).newest == CommitId(0, 1), "for ever"


def test_a_restore_in_the_middle_of_a_job_falls_back_too_and_tells(
    file_storage: CommitStorage, member: Any, world: Any
) -> None:
    storage = file_storage()
    state = ObjectState(n=0, x=torch.zeros(3))
    committer_of(state).use_storage(storage)
    session = member(world(1))
    committer_of(state).use_session(session)
    for state.n in (1, 2):
        state.x.fill_(state.n)
        state.commit()
    committer_of(state).snapshot._newer.memory[committer_of(state).snapshot._newer.frame.tensors] ^= 4
    state.restore()
    assert (state.n, state.x.tolist()) == (1, [1.0] * 3)
    assert session.commits[-1] == state.commits == (CommitId(1, 1), None)


def test_if_both_are_damaged_nothing_is_claimed(file_storage: CommitStorage) -> None:
    storage = file_storage()
    two_commits(storage)
    at = inside_the_weights(storage)
    for file in storage.files:
        damage(file, at)
    state = model_state(1, file_storage())
    with pytest.raises(StateError, match="Both commits of this worker are damaged"):
        state.restore()
    assert state.commits == (None, None)
    assert not committer_of(state).resume()
    with pytest.raises(StateError, match="holds no commit to restore"):
        state.restore()


def test_what_is_damaged_is_not_unpickled(file_storage: CommitStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = file_storage()
    two_commits(storage)
    snapshot = Snapshot(file_storage())
    for buffer in (snapshot._newer, snapshot._older):
        damage(storage.files[buffer.index], buffer.frame.objects + 3)
    monkeypatch.setattr("elasticstate.state.snapshot.pickle.loads", lambda _: pytest.fail("unpickled"))
    with pytest.raises(StateError, match="Both commits of this worker are damaged"):
        snapshot.load_into({})
    with pytest.raises(StateError, match="is not held"):
        read_commit(snapshot, CommitId(0, 2))


@pytest.mark.parametrize("newest_fits", [True, False])
def test_a_commit_that_does_not_fit_stays_and_is_not_replaced_by_an_older_one(
    newest_fits: bool, file_storage: CommitStorage
) -> None:
    storage = file_storage()
    for tick, width in enumerate((4, 5) if newest_fits else (5, 6), start=1):
        state = TorchState(model=torch.nn.Linear(width, 2))
        committer_of(state).use_storage(storage)
        committer_of(state).seal(CommitId(1, tick))
    state = TorchState(model=torch.nn.Linear(5, 2))
    committer_of(state).use_storage(file_storage())
    if newest_fits:
        assert committer_of(state).resume()
    else:
        text = r"commit \(1, 2\) is whole, but cannot be loaded: state\.model: weight is \(2, 5\)"
        with pytest.raises(StateMisfitError, match=text):
            committer_of(state).resume()
    assert state.commits == (CommitId(1, 2), CommitId(1, 1))
    assert Snapshot(file_storage()).newest == CommitId(1, 2)


def test_no_bit_that_flips_goes_unnoticed(file_storage: CommitStorage) -> None:
    """A bit may flip anywhere in the sealed bytes. The restored commit is always exactly one of the two."""
    storage = file_storage()
    both = two_commits(storage)
    expected = {CommitId(0, tick): found for tick, found in enumerate(both, start=1)}
    state = model_state(1, file_storage())
    length = committer_of(state).snapshot._newer.length
    originals = [file.read_bytes() for file in storage.files]
    page = storage.control.read_bytes()
    memory = [committer_of(state).snapshot._storage.open(index) for index in (0, 1)]
    dice, outcomes = random.Random(0), []
    for _ in range(400):
        for index, tensor in enumerate(memory):
            tensor.numpy()[:] = np.frombuffer(originals[index], dtype=np.uint8)
        with storage.control.open("r+b") as file:
            file.write(page)
        for index in (0, 1):
            if dice.random() < 0.6:
                at = dice.choice([dice.randrange(length), dice.randrange(2000)])
                memory[index].numpy()[at] ^= 1 << dice.randrange(8)
            elif dice.random() < 0.3:
                at = dice.randrange(512)
                with storage.control.open("r+b") as file:
                    file.seek(at)
                    byte = file.read(1)[0] ^ (1 << dice.randrange(8))
                    file.seek(at)
                    file.write(bytes([byte]))
        committer_of(state).use_storage(committer_of(state).snapshot._storage)
        resumed = committer_of(state).resume()
        outcomes.append(resumed)
        if resumed:
            newest = state.commits[0]
            assert newest is not None
            assert (content(state), torch.get_rng_state().tolist()) == expected[newest]
        else:
            assert state.commits == (None, None)
    assert 50 < outcomes.count(True) < 350, "both happen"


def test_no_space_costs_the_older_commit_and_not_the_newest(file_storage: CommitStorage) -> None:
    storage = file_storage(limit_bytes=1 << 20)
    snapshot = Snapshot(storage)
    for tick in (1, 2):
        snapshot.write({"x": torch.full((5,), float(tick))}, b"", CommitId(1, tick))
    for _ in range(2):
        with pytest.raises(CommitStorageError, match=f"{1 << 20} free"):
            snapshot.write({"x": torch.ones(1 << 20)}, b"", CommitId(1, 3))
        assert (snapshot.newest, snapshot.previous) == (CommitId(1, 2), None)
        assert read_commit(snapshot, CommitId(1, 2))["x"].tolist() == [2.0] * 5
    with pytest.raises(CommitStorageError):
        snapshot.reserve(1 << 21)
    snapshot.write({"x": torch.full((5,), 4.0)}, b"", CommitId(1, 4))
    assert read_commit(Snapshot(file_storage()), CommitId(1, 4))["x"].tolist() == [4.0] * 5


def test_a_restamped_commit_is_found_under_its_new_id(file_storage: CommitStorage) -> None:
    snapshot = Snapshot(file_storage())
    for tick in (1, 2):
        snapshot.write({"n": tick}, b"mine", CommitId(1, tick))
    snapshot.restamp(CommitId(3, 0))
    found = Snapshot(file_storage())
    assert (found.newest, found.previous) == (CommitId(3, 0), CommitId(1, 1))
    assert read_commit(found, CommitId(3, 0))["n"] == 2
    assert found.read_private(CommitId(3, 0)) == b"mine"


def test_forgetting_is_for_ever(file_storage: CommitStorage) -> None:
    two_commits(file_storage())
    Snapshot(file_storage()).forget()
    assert Snapshot(file_storage()).newest is None


def test_a_write_that_ends_half_way_leaves_the_newest_commit_to_the_next_worker(
    file_storage: CommitStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot(file_storage())
    for tick in (1, 2):
        snapshot.write({"x": torch.full((5,), float(tick))}, b"", CommitId(1, tick))

    def killed(buffer: torch.Tensor, *_: object) -> None:
        buffer.fill_(7)
        raise KeyboardInterrupt

    monkeypatch.setattr("elasticstate.state.snapshot.gather", killed)
    with pytest.raises(KeyboardInterrupt):
        snapshot.write({"x": torch.full((5,), 3.0)}, b"", CommitId(1, 3))
    found = Snapshot(file_storage())
    assert (found.newest, found.previous) == (CommitId(1, 2), None)
    assert read_commit(found, CommitId(1, 2))["x"].tolist() == [2.0] * 5
