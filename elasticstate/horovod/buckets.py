"""Buckets: gradients that are sent together, because many small collectives cost more than few large ones.

The plan is that of DistributedDataParallel: parameters in reverse order, as backward reaches them; a small first
bucket, so that communication starts early; then large buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elasticstate.extension import copy_all
from elasticstate.horovod import timeline
from elasticstate.horovod.compression import Compressor
from elasticstate.horovod.failures import failures_named
from elasticstate.horovod.members import Members
from elasticstate.horovod.reduction import scale

FIRST_BYTES, BYTES = 1 << 20, 25 << 20
_LARGE = 1 << 16  # elements: if gradients have more, one more pass over the memory costs more than a call for each


def plan(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets of one dtype and device each, in the order in which they are reduced."""
    full: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    remaining_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(parameter)
        remaining_bytes[kind] = remaining_bytes.get(kind, FIRST_BYTES) - parameter.nbytes
        if remaining_bytes[kind] <= 0:
            remaining_bytes[kind] = BYTES
            full.append(filling.pop(kind))
    return full + list(filling.values())


class Bucket:
    """Parameters whose gradients are copied into one tensor, which is summed over all ranks.

    ``name``: its row in the timeline.
    """

    def __init__(self, parameters: list[torch.Tensor], name: str) -> None:
        self._name = name
        self._span: timeline.Span | None = None
        self.parameters = parameters
        self.incomplete = len(parameters)  # gradients that are not complete yet
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._sent: torch.Tensor | None = None
        self._context: Any = None
        self._work: Any = None

    def reset(self) -> None:
        """Forget all gradients of the last step."""
        self.incomplete = len(self.parameters)
        self._sent = self._context = self._work = None

    def remove(self, parameter: torch.Tensor) -> None:
        """Remove a parameter whose gradient was incomplete, before ``launch``."""
        self.parameters = [p for p in self.parameters if p is not parameter]
        self.incomplete -= 1
        self._flat = None

    def drop(self) -> None:
        """Reset, and also replace the tensor, because a running collective may still write into it."""
        self.reset()
        self._flat = None

    def launch(self, factor: float, compression: type[Compressor], members: Members) -> None:
        """Start the sum. Parameters without a gradient count as zeros. A bucket without parameters does nothing."""
        if not self.parameters:
            return
        flat = self._buffer()
        given = [(view, p.grad) for view, p in zip(self._views, self.parameters, strict=True) if p.grad is not None]
        with torch.no_grad():
            if len(given) < len(self._views):
                flat.zero_()
            if given:
                copy_all([view for view, _ in given], [gradient for _, gradient in given])
            scale(flat, factor)
            self._sent, self._context = compression.compress(flat)
        self._start(members)

    def launch_nothing(self, compression: type[Compressor], members: Members) -> None:
        """Start the sum with zeros, on a rank that has joined."""
        if not self.parameters:
            return
        self._sent, self._context = compression.compress(self._buffer().zero_())
        self._start(members)

    def _start(self, members: Members) -> None:
        assert self._sent is not None
        self._span = timeline.exchange_bucket(self._name, self._sent)
        self._work = dist.all_reduce(self._sent, group=members.lane, async_op=True)

    def wait(self) -> None:
        """Wait for the sum. Raises the collective's error."""
        if self.parameters:
            with failures_named():
                self._work.wait()
            timeline.end(self._span)

    def finish(self, factor: float, compression: type[Compressor]) -> None:
        """Wait for the sum, and copy it to the gradients. Raises the collective's error."""
        if not self.parameters:
            return
        self.wait()
        assert self._sent is not None, "it was started"
        with torch.no_grad():
            flat, sent = self._buffer(), compression.decompress(self._sent, self._context)
            if sent.data_ptr() != flat.data_ptr():
                flat.copy_(sent)
            given = []
            for view, parameter in zip(self._views, self.parameters, strict=True):
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    given.append((parameter.grad, view))
            _copy_scaled(given, flat, factor)

    def _buffer(self) -> torch.Tensor:
        """Return one tensor for all gradients, with a view for each. Made again after a model was moved or cast."""
        like, flat = self.parameters[0], self._flat
        if flat is None or flat.device != like.device or flat.dtype != like.dtype:
            self._flat = flat = torch.empty(
                sum(p.numel() for p in self.parameters), dtype=like.dtype, device=like.device
            )
            parts = torch.split(flat, [p.numel() for p in self.parameters])
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        return flat


def _copy_scaled(given: list[tuple[torch.Tensor, torch.Tensor]], flat: torch.Tensor, factor: float) -> None:
    """Copy to each gradient its view of ``flat``, multiplied by ``factor``."""
    if factor != 1.0 and flat.device.type == "cpu" and flat.numel() >= _LARGE * len(given):
        for gradient, view in given:
            torch.mul(view, factor, out=gradient)
        return
    scale(flat, factor)
    copy_all([gradient for gradient, _ in given], [view for _, view in given])
