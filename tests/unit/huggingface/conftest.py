"""Each test begins without Accelerate's singletons, and computes with one thread."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from elasticstate.compat.libraries import clear_singletons

collect_ignore = [] if find_spec("transformers") else ["test_trainer.py"]  # Transformers requires Python 3.11


@pytest.fixture(autouse=True)
def one_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    clear_singletons()
