"""Sentinels of a file's tests end with it."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_sentinel_outlives_its_file() -> Iterator[None]:
    """A sentinel whose generation has ended cuts all Gloo operations of this process. Many are parts of cycles."""
    yield
    gc.collect()
