"""The short descriptions of messages, and decoders that accept only valid messages."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from elasticstate.core.ids import CommitId, WorkerId
from elasticstate.core.types import Placement, as_runs, from_runs
from elasticstate.net import messages

W = WorkerId("h", 0, 1)
WORLD = messages.World(3, (Placement(W, 0, 0, 1, 0, 0, 1),), 1, 0, ((0, 2),), "h:1", keepers=(0, 3))
STAMP = messages.Stamp(messages.Place.TRAIN, 1, 2, CommitId(1, 2))
SAID = [
    (messages.decode_opening, messages.AgentHello("h", "id", 0, 0, 1, 1, "1")),
    (
        messages.decode_from_agent,
        messages.HostReport(((0, CommitId(1, 1)),), (messages.WorkerReport(W, 1, 1, STAMP, ()),)),
    ),
    (messages.decode_from_agent, messages.FromWorker(W, messages.Ready(1, None, CommitId(1, 1), "h:1", 2, 0.5))),
    (messages.decode_to_agent, WORLD),
    (messages.decode_to_agent, messages.ToWorkers(None, messages.End(1, None, "x"))),
]


@given(st.sets(st.integers(0, 300)))
def test_runs_stand_for_the_same_numbers(numbers: set[int]) -> None:
    runs = as_runs(sorted(numbers))
    assert from_runs(runs) == tuple(sorted(numbers))
    assert len(runs) == sum(number - 1 not in numbers for number in numbers)


def test_what_all_but_one_lack_is_short() -> None:
    assert as_runs(rank for rank in range(10_000) if rank != 7) == ((0, 7), (8, 10_000))


@pytest.mark.parametrize(("decode", "message"), SAID)
def test_a_message_comes_out_as_it_went_in(decode: object, message: object) -> None:
    assert callable(decode)
    assert decode(messages.encode(message)) == message


@pytest.mark.parametrize("decode", [messages.decode_opening, messages.decode_from_agent, messages.decode_to_agent])
@given(data=st.binary(max_size=200))
@settings(max_examples=300)
def test_rubbish_is_no_message(decode: object, data: bytes) -> None:
    assert callable(decode)
    with pytest.raises(msgspec.DecodeError):
        decode(data)


@given(st.sampled_from(SAID), st.data())
@settings(max_examples=1000)
def test_a_damaged_message_is_refused_or_is_another_valid_one(said: tuple[object, object], data: st.DataObject) -> None:
    decode, message = said
    assert callable(decode)
    whole = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    for damaged in (bytes(whole), bytes(cut)):
        try:
            found = decode(damaged)
        except msgspec.DecodeError:
            continue
        again = messages.encode(found)  # compares bytes, because a damaged number may be NaN, which equals nothing
        assert messages.encode(decode(again)) == again
