"""How tensors are made smaller on their way. One's own: any class with these two static methods."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """``compress`` gives the tensor to send, same shape, and what ``decompress`` wants to know."""

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
    """Those that are there. The sum is made of what is sent; the division of an average comes after decompression."""

    none: type[Compressor] = _Unchanged
    fp16: type[Compressor] = _Half
