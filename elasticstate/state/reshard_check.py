"""Comparison of attached values after a reshard with the commit that they come from: for ``--verify-sync``.

Each tensor gets a sum over its elements, of a mix of the element's bits with its position in the whole tensor. The sum
does not depend on how the tensor is cut, so the parts of the commit and those of this world have the same one. The
parts of the commit are divided among the ranks, which read them once more. No rank makes a tensor whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from elasticstate.commit_header import Shard
from elasticstate.core.texts import listed
from elasticstate.errors import StateDivergedError
from elasticstate.state.reshard import MAX_NAMES, CommitCopies
from elasticstate.state.shards import PartPlace, Piece

_ELEMENTS = 1 << 20  # that are summed at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd numbers: those of XXH64
_MASK = (1 << 64) - 1

_Measured = tuple[PartPlace, int]
"""A part of a tensor, and the sum of its content."""


def check_reshard(
    copies: CommitCopies, pieces: Mapping[str, Piece], rank: int, size: int, exchange: Callable[[bytes], list[bytes]]
) -> None:
    """Compare the tensors of all ranks with those of the commit. All ranks of the world call it.

    Args:
        pieces: the tensors of this rank by name, after the reshard.
        exchange: sends a message to all ranks, and returns the messages of all of them.

    Raises:
        StateDivergedError: tensors differ. All ranks raise it, with the same message.
        CollectiveError: parts of the commit cannot be read from any copy.
    """
    live = [_measured(name, piece) for name, piece in pieces.items() if piece.local.numel()]
    stored = [_read(copies, place) for place in sorted(copies.places())[rank::size]]
    messages = exchange(msgspec.msgpack.encode((live, stored)))
    everyone = [msgspec.msgpack.decode(message, type=tuple[list[_Measured], list[_Measured]]) for message in messages]
    present = _contents(part for parts, _ in everyone for part in parts)
    committed = _contents(part for _, parts in everyone for part in parts)
    wrong = sorted(name for name, content in present.items() if committed.get(name, content) != content)
    if wrong:
        more = f" and {len(wrong) - MAX_NAMES} more" if len(wrong) > MAX_NAMES else ""
        raise StateDivergedError(
            f"--verify-sync: after the reshard, attached values are not those of the commit: "
            f"{listed(wrong[:MAX_NAMES])}{more}. Report this as a bug, with the shapes and placements of these tensors."
        )


def _measured(name: str, piece: Piece) -> _Measured:
    return PartPlace(name, piece.shard.shape, piece.shard.offsets, tuple(piece.local.shape)), content_sum(piece)


def _read(copies: CommitCopies, place: PartPlace) -> _Measured:
    """Read a part of the commit."""
    _, dtype = copies.find(place.name)
    piece = Piece(torch.empty(place.sizes, dtype=dtype), Shard(place.shape, place.offsets))
    copies.load({place.name: piece})
    return place, content_sum(piece)


def _contents(parts: Iterable[_Measured]) -> dict[str, list[int]]:
    """Return the sum of each tensor; for replicas that differ all of their sums, which equal those of no tensor.

    A tensor whose parts overlap without being replicas is left out: ranks of different meshes hold it.
    """
    sums: dict[PartPlace, set[int]] = {}
    for place, content in parts:
        sums.setdefault(place, set()).add(content)
    of_name: dict[str, list[PartPlace]] = {}
    for place in sums:
        of_name.setdefault(place.name, []).append(place)
    found: dict[str, list[int]] = {}
    for name, places in of_name.items():
        if differing := [content for place in places if len(sums[place]) > 1 for content in sums[place]]:
            found[name] = sorted(differing)
        elif sum(math.prod(place.sizes) for place in places) == math.prod(places[0].shape):
            found[name] = [sum(min(sums[place]) for place in places) & _MASK]
    return found


def content_sum(piece: Piece) -> int:
    """Return the sum over the elements of a part: 64 bits, the same for each division of a tensor into parts."""
    local, shape, offsets = piece.local.detach(), piece.shard.shape, piece.shard.offsets
    if local.is_complex():
        local, shape, offsets = torch.view_as_real(local), (*shape, 2), (*offsets, 0)
    if not local.dim():
        local, shape, offsets = local.reshape(1), (1,), (0,)
    rows = max(1, _ELEMENTS // max(1, math.prod(local.shape[1:])))
    total = 0
    for begin in range(0, local.shape[0], rows):
        block = local[begin : begin + rows].cpu().contiguous()
        bits = block.view(_BITS[block.element_size()]).to(torch.int64)
        mixed = bits * _MIX[0] + _positions(block.shape, shape, (offsets[0] + begin, *offsets[1:])) * _MIX[1]
        mixed ^= mixed >> 29
        mixed *= _MIX[2]
        mixed ^= mixed >> 32
        total += int(mixed.sum())
    return total & _MASK


def _positions(sizes: Iterable[int], shape: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
    """Return the index of each element of a block in the flattened whole tensor."""
    found = torch.zeros((), dtype=torch.int64)
    for d, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        found = found.unsqueeze(-1) + (torch.arange(size) + offset) * math.prod(shape[d + 1 :])
    return found
