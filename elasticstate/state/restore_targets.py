"""RestoreTargets: tensors that get the content of a commit, and calls that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elasticstate.compat import dtensors
from elasticstate.compat.dtensors import Split
from elasticstate.errors import StateError
from elasticstate.state.reshard import CommitCopies, Piece, chunk_of, piece_of


class RestoreTargets:
    """Tensors by name. ``load`` reads all of them at once."""

    def __init__(self, copies: CommitCopies) -> None:
        self._copies = copies
        self.pieces: dict[str, Piece] = {}
        self._calls: list[Callable[[], object]] = []

    def load(self, when_opened: Callable[[], object] | None) -> None:
        """Read the content of all tensors, then make the calls. See ``CommitCopies.load``, which raises the same."""
        self._copies.load(self.pieces, when_opened)
        for call in self._calls:
            call()

    def afterwards(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that exists. Its shape and dtype must be those of the commit."""
        self.pieces[name] = piece_of(name, tensor)

    def tensor(self, live: object, name: str, device: torch.device) -> torch.Tensor:
        """Add ``live`` if the content fits into it, otherwise a new plain tensor. Return the added one."""
        shape, dtype = self._copies.find(name)
        if not _fits(live, shape, dtype):
            live = torch.empty(shape, dtype=dtype, device=device)
        assert isinstance(live, torch.Tensor)
        self.add(name, live)
        return live

    def tensor_of(
        self,
        parameter: torch.Tensor,
        splits: tuple[Split, ...] | None,
        live: object,
        name: str,
        device: torch.device,
    ) -> torch.Tensor:
        """Do what ``tensor`` does, for a DTensor in the state of an optimizer that belongs to ``parameter``.

        ``splits``: its placements in the commit. None: those of the parameter, which may be others now.

        Raises StateError if the placements are not the parameter's, and cannot be those of a tensor in this world.
        """
        shape, dtype = self._copies.find(name)
        if _fits(live, shape, dtype) or not dtensors.is_dtensor(parameter):
            return self.tensor(live, name, device)
        like: Any = parameter
        mesh = like.device_mesh
        placed = dtensors.splits_of(like) if splits is None else splits
        if len(placed) != mesh.ndim or any(split is not None and split[0] >= len(shape) for split in placed):
            raise StateError(
                f"{name} was sharded in another way than its parameter, on a mesh of {len(placed)} dimensions, and the "
                f"mesh of this world has {mesh.ndim}. Create the state of the optimizer before attach()."
            )
        coordinate = mesh.get_coordinate()
        _, sizes = chunk_of(shape, tuple(mesh.shape), tuple(coordinate), placed) if coordinate else ((), (0,))
        local = torch.empty(sizes, dtype=dtype, device=dtensors.local_of(like).device)
        made: torch.Tensor = dtensors.like(like, splits, local, shape)
        self.add(name, made)
        return made


def _fits(live: object, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if a live tensor can be overwritten with a content of this shape and dtype."""
    if not isinstance(live, torch.Tensor) or tuple(live.shape) != shape or live.dtype != dtype:
        return False
    return dtensors.is_dtensor(live) or live.is_contiguous()
