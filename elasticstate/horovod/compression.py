"""Compression of tensors for a collective. A compressor is any class with the two static methods of ``Compressor``."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """``compress`` returns the tensor to send, with the same shape, and a context for ``decompress``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class _Unchanged:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Half:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressors. Ranks sum the compressed tensors. The division of an average follows decompression."""

    none: type[Compressor] = _Unchanged
    fp16: type[Compressor] = _Half
