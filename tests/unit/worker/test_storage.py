"""Buffers in files of the slot: the agent makes them, the worker maps them, and the next worker finds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elasticstate.agent.host_storage import HostStorage
from elasticstate.commits import CommitDirectory, buffer_file, grow
from elasticstate.core.ids import CommitId
from elasticstate.errors import CommitStorageError
from elasticstate.net.link import Given
from elasticstate.net.messages import BufferGrown, GrowBuffer
from elasticstate.state.snapshot import Snapshot
from elasticstate.worker.storage import AgentStorage

LIMIT_BYTES = 1 << 20


class Slot:
    """Files of a slot, and an agent that provides commit storage up to a limit."""

    def __init__(self, directory: Path) -> None:
        self.directory = CommitDirectory(str(directory), "c0ffee", "h", str(directory), "/mark", 5.0, 300.0)
        self.storage = HostStorage(self.directory, "c0ffee", "h", lambda _: None)
        self.storage.make_result(0)
        self.asked: list[GrowBuffer] = []

    def worker_storage(self, job_id: str = "c0ffee", key: bytes = b"key") -> AgentStorage:
        owner = HostStorage(self.directory, job_id, "h", lambda _: None).owner(0)
        return AgentStorage(lambda: self._give(key), owner, self._answer)

    def _give(self, key: bytes) -> Given:
        page, first, second = map(os.dup, self.storage.files(0).descriptors)
        result = self.storage.result(0)
        assert result is not None
        return Given(key, page, (first, second), os.dup(result), None)

    def _answer(self, question: GrowBuffer, answer: type[BufferGrown]) -> BufferGrown:
        self.asked.append(question)
        if question.bytes > LIMIT_BYTES:
            return answer(question.index, 0, "commits do not fit")
        return answer(question.index, grow(self.storage.files(0).buffers[question.index], question.bytes), "")


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path)


def test_a_buffer_that_nobody_has_made_is_empty(slot: Slot) -> None:
    assert slot.worker_storage().open(0).numel() == 0


def test_a_buffer_grows_by_asking_and_is_a_file_that_others_see(slot: Slot) -> None:
    storage = slot.worker_storage()
    memory = storage.grow(1, 5000)
    assert slot.asked == [GrowBuffer(1, 5000)]
    assert memory.shape == (5000,)
    memory[4999] = 7
    assert (slot.directory.path / buffer_file(0, 1)).read_bytes()[-1] == 7
    assert slot.worker_storage().open(1)[4999] == 7
    assert slot.worker_storage().open(0).numel() == 0


def test_no_room_is_an_error_with_the_words_of_the_agent(slot: Slot) -> None:
    with pytest.raises(CommitStorageError, match="commits do not fit"):
        slot.worker_storage().grow(0, LIMIT_BYTES + 1)


def test_a_commit_is_held_by_the_next_worker_of_the_slot_and_by_nobody_else(
    slot: Slot, caplog: pytest.LogCaptureFixture
) -> None:
    first = Snapshot(slot.worker_storage())
    first.write({"weight": torch.arange(1000.0)}, b"random", CommitId(3, 7))
    assert Snapshot(slot.worker_storage("another job")).newest is None
    second = Snapshot(slot.worker_storage())
    assert second.newest == CommitId(3, 7)
    values = second.load_into({"weight": torch.zeros(1000)})
    assert torch.equal(values["weight"], torch.arange(1000.0))
    assert Snapshot(slot.worker_storage(key=b"another key")).newest is None
    assert "another process than a worker of this job changed the buffer" in caplog.text
