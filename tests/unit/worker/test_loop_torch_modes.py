from __future__ import annotations

import torch

from elasticstate.worker.loop import TorchModes


def test_all_modes_that_functions_have_set_are_set_back() -> None:
    modes = TorchModes()
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.autocast("cpu").__enter__()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    modes.set()
    assert vars(TorchModes()) == vars(modes)
    assert torch.is_grad_enabled()
    assert torch.ones(1).dtype == torch.float32
    assert torch.ones(1).is_cpu


def test_modes_of_the_script_stay() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        modes = TorchModes()
        with torch.autocast("cpu"):
            inside = TorchModes()
        torch.set_default_dtype(torch.float32)
        modes.set()
        assert torch.get_default_dtype() == torch.float64
        assert vars(inside) != vars(modes)
    finally:
        torch.set_default_dtype(torch.float32)
