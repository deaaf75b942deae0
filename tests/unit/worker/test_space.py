"""Buffers that are files of the slot: made by the agent, mapped by the worker, there for the next one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elasticstate._native import ControlPage
from elasticstate.agent.room import grow
from elasticstate.commits import buffer_file, control_file, owner_of
from elasticstate.core.types import CommitId
from elasticstate.errors import CommitSpaceError
from elasticstate.net.messages import NeedSpace, Space
from elasticstate.state.snapshot import Snapshot
from elasticstate.worker.space import AgentSpace

LIMIT_BYTES = 1 << 20


class Slot:
    """A slot's files, and an agent that gives room up to a limit."""

    def __init__(self, directory: Path) -> None:
        self.prefix = str(directory / "0")
        self.asked: list[NeedSpace] = []
        Path(control_file(self.prefix)).write_bytes(bytes(4096))

    def space(self, job_id: str = "c0ffee") -> AgentSpace:
        return AgentSpace(self.prefix, ControlPage(control_file(self.prefix)), owner_of(job_id, "h", 0), self._answer)

    def _answer(self, question: NeedSpace, answer: type[Space]) -> Space:
        self.asked.append(question)
        if question.bytes > LIMIT_BYTES:
            return answer(question.index, 0, "commits do not fit")
        return answer(question.index, grow(buffer_file(self.prefix, question.index), question.bytes), "")


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path)


def test_a_buffer_that_nobody_has_made_is_empty(slot: Slot) -> None:
    assert slot.space().open(0).numel() == 0


def test_a_buffer_grows_by_asking_and_is_a_file_that_others_see(slot: Slot) -> None:
    space = slot.space()
    memory = space.grow(1, 5000)
    assert slot.asked == [NeedSpace(1, 5000)]
    assert memory.shape == (5000,)
    memory[4999] = 7
    assert Path(buffer_file(slot.prefix, 1)).read_bytes()[-1] == 7
    assert slot.space().open(1)[4999] == 7
    assert slot.space().open(0).numel() == 0


def test_no_room_is_an_error_with_the_words_of_the_agent(slot: Slot) -> None:
    with pytest.raises(CommitSpaceError, match="commits do not fit"):
        slot.space().grow(0, LIMIT_BYTES + 1)


def test_a_commit_is_held_by_the_next_worker_of_the_slot_and_by_nobody_else(slot: Slot) -> None:
    first = Snapshot(slot.space())
    first.write({"weight": torch.arange(1000.0)}, b"random", CommitId(3, 7))
    assert Snapshot(slot.space("another job")).newest is None
    second = Snapshot(slot.space())
    assert second.newest == CommitId(3, 7)
    values = second.restore({"weight": torch.zeros(1000)})
    assert torch.equal(values["weight"], torch.arange(1000.0))
