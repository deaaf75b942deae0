"""Comparison of the value names of the root with those of the ranks that need the root's state, before a sync."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from elasticstate.core.texts import listed
from elasticstate.errors import StateError
from elasticstate.state.channel import Channel, taking_part
from elasticstate.state.layout import digest
from elasticstate.state.session import Session

Kinds = dict[str, bool]
"""For each value's name: True if the value is an object with ``state_dict()`` that a rank loads from the root's."""


def number_of_names(kinds: Kinds) -> int:
    """Return a digest of 63 bits, which differs if the kinds differ."""
    return digest(msgspec.msgpack.encode(sorted(kinds.items()))) >> 1


def compare_names(channel: Channel, session: Session, lacking: Sequence[int], kinds: Kinds, has_commit: bool) -> None:
    """Raise StateError if this rank cannot take part in a sync, before anything is sealed, sent or written.

    If only other ranks cannot, this rank continues. The sync or the training then fails with the generation. The
    arguments are those of ``find_refused``; ``lacking``: the ranks that get the state.
    """
    ranks = taking_part(session.root, lacking)
    refused = find_refused(channel, ranks, session.root, kinds, has_commit)
    if session.rank in refused:
        raise StateError(refused[session.rank])


def find_refused(channel: Channel, ranks: Sequence[int], root: int, kinds: Kinds, has_commit: bool) -> dict[int, str]:
    """Return the text of the error for each rank that cannot take part in the sync. All ``ranks`` return the same.

    These are all ``ranks`` if the root has no commit: then the job has not trained yet. In a running job, these are
    the ranks that differ from the root, because the error of a newcomer must not end the other workers.

    If all ranks are equal, this takes one small collective.

    Args:
        channel: of ``ranks``, which are ascending.
        kinds: those of this rank.
        has_commit: True if this rank holds a commit. Only the root's answer counts.
    """
    numbers = channel.numbers_of_all([number_of_names(kinds)])
    if all(row == numbers[0] for row in numbers):
        return {}
    messages = channel.messages_of_all(msgspec.msgpack.encode((kinds, has_commit)))
    states = {
        rank: msgspec.msgpack.decode(message, type=tuple[Kinds, bool])
        for rank, message in zip(ranks, messages, strict=True)
    }
    expected, is_running = states[root]
    different: dict[str, list[int]] = {}
    for rank, (found, _) in states.items():
        for difference in _differences(expected, found, root, is_running):
            different.setdefault(difference, []).append(rank)
    if not different:
        return {}
    parts = listed((_on_ranks(difference, of) for difference, of in different.items()), "; ")
    text = (
        f"Ranks have states of different values: {parts}. Construct the state with the same names and kinds of values "
        "on every rank."
    )
    refused = itertools.chain(*different.values()) if is_running else ranks
    return dict.fromkeys(sorted(refused), text)


def _differences(expected: Kinds, found: Kinds, root: int, is_running: bool) -> Iterator[str]:
    """Yield texts that ``_on_ranks`` completes with the ranks that differ in this way.

    In a running job, the root may have replaced an object by a plain value: then the newcomer's is replaced, too. The
    opposite is a difference, as a plain value cannot load the state of an object.
    """
    if lacking := [name for name in expected if name not in found]:
        yield f"{{who}} {{lack}} {_quoted(lacking)}, which rank {root} has"
    if surplus := [name for name in found if name not in expected]:
        yield f"{{who}} {{have}} {_quoted(surplus)}, which rank {root} lacks"
    for name in expected:
        if name in found and found[name] != expected[name] and (expected[name] or not is_running):
            yield f"{name!r} is {_kind(found[name])} on {{who}}, and {_kind(expected[name])} on rank {root}"


def _on_ranks(difference: str, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return difference.format(who=f"rank {ranks[0]}", lack="lacks", have="has")
    return difference.format(who=f"ranks {listed(map(str, ranks))}", lack="lack", have="have")


def _quoted(names: list[str]) -> str:
    return listed(map(repr, names))


def _kind(has_state_dict: bool) -> str:
    return "an object with state_dict()" if has_state_dict else "a value without state_dict()"
