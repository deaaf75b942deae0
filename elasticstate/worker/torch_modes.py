"""TorchModes: torch's modes of this process, which a failure may leave as an interrupted function has set them.

A ``with`` block ends by the exception of the failure. A function such as ``torch.set_grad_enabled(False)`` has no end:
a survivor would train on without gradients, and newcomers with them. So each call of the user's function begins with
the modes of the first one.
"""

from __future__ import annotations

from typing import Any

import torch


class TorchModes:
    """The modes of the calling thread at the time of construction.

    They are: gradients, autocast, default dtype and device, deterministic algorithms, and anomaly detection.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = {kind: _autocast(kind) for kind in _device_types()}
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._deterministic = _deterministic()
        self._anomaly = _anomaly()

    def set(self) -> None:
        """Make these the modes of the calling thread again."""
        torch.set_grad_enabled(self._grad)
        for kind, modes in self._autocast.items():
            if _autocast(kind) != modes:
                torch.set_autocast_enabled(kind, modes[0])
                torch.set_autocast_dtype(kind, modes[1])
        torch.set_autocast_cache_enabled(self._caches_casts)
        for _ in range(_autocast_nesting() - self._nesting):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        if torch.get_default_device() != self._device:
            torch.set_default_device(None if self._device.type == "cpu" else self._device)
        if _deterministic() != self._deterministic:
            torch.use_deterministic_algorithms(self._deterministic[0], warn_only=self._deterministic[1])
        if _anomaly() != self._anomaly:
            torch.autograd.set_detect_anomaly(*self._anomaly)


def _device_types() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _autocast(device_type: str) -> tuple[bool, Any]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _autocast_nesting() -> int:
    """Return how many autocast contexts are open."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
