"""A world of one in this process, and its next worlds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elasticstate.compat.hugging_face import clear_singletons


@pytest.fixture(autouse=True)
def no_singletons(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    clear_singletons()
