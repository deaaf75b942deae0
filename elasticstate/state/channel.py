"""Collectives for the state: broadcasts from one rank of a group, and gathers among all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from elasticstate.state.session import Session

CHUNK_BYTES = 1 << 30  # size of one broadcast, because the timeout of a process group applies to each collective
FIRST_BYTES = 1 << 15  # of a message travel with its length: a collective costs more than these bytes
_LENGTH_BYTES = 8


class Channel:
    """Broadcasts from one rank of a group, and gathers among all of its ranks.

    Args:
        group: the process group; None is the default group.
        root: rank within the group that sends.
    """

    def __init__(self, group: dist.ProcessGroup | None, root: int) -> None:
        default = dist.group.WORLD
        chosen = group if group is not None else default
        assert chosen is not None, "a generation always has a default process group"
        self._group = chosen
        self._options = dist.BroadcastOptions()
        self._options.rootRank = root

    def broadcast(self, data: torch.Tensor) -> None:
        """Send or receive ``uint8[n]`` in place, one collective for each ``CHUNK_BYTES``."""
        for begin in range(0, data.numel(), CHUNK_BYTES):
            self._broadcast(data[begin : begin + CHUNK_BYTES])

    def send(self, message: bytes) -> None:
        """Broadcast a message: one collective, or more if it is longer than ``FIRST_BYTES``."""
        whole = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        sent = torch.frombuffer(bytearray(whole.ljust(FIRST_BYTES)), dtype=torch.uint8)
        self._broadcast(sent[:FIRST_BYTES])
        self.broadcast(sent[FIRST_BYTES:])

    def receive(self) -> bytes:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._broadcast(first)
        whole = first.numpy().tobytes()
        end = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
        rest = torch.empty(max(0, end - FIRST_BYTES), dtype=torch.uint8)
        self.broadcast(rest)
        return whole[_LENGTH_BYTES:end] + rest.numpy().tobytes()

    def numbers_of_all(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank, by rank. All ranks pass equally many numbers. One collective."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [row.tolist() for row in self._gather(mine)]

    def messages_of_all(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank. Two collectives."""
        lengths = [length for (length,) in self.numbers_of_all([len(message)])]
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths))), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def _broadcast(self, data: torch.Tensor) -> None:
        self._group.broadcast([data], self._options).wait()

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([rows], [mine]).wait()
        return rows


def channel_between(session: Session, root: int, lacking: Sequence[int]) -> Channel:
    """Return the channel from the root of a sync to the ranks that lack the state."""
    ranks = taking_part(root, lacking)
    return Channel(session.process_group_for(ranks), ranks.index(root))


def taking_part(root: int, lacking: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a sync, ascending."""
    return tuple(sorted({root, *lacking}))
