"""Collectives for the state: broadcasts from one rank of a group, and gathers among all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

CHUNK_BYTES = 1 << 30  # size of one broadcast, because the timeout of a process group applies to each collective


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
            self._group.broadcast([data[begin : begin + CHUNK_BYTES]], self._options).wait()

    def send(self, message: bytes) -> None:
        """Broadcast a message with two collectives: the length, then the content."""
        self.broadcast(torch.tensor([len(message)]).view(torch.uint8))
        self.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self.broadcast(length.view(torch.uint8))
        message = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast(message)
        return message.numpy().tobytes()

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

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._group.allgather([rows], [mine]).wait()
        return rows
