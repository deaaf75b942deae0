"""Fixtures for tests that start many scripts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forks import Template


@pytest.fixture(scope="module")
def template(lasting_processes: set[int]) -> Iterator[Template]:
    """The process from which scripts fork. It imports torch once for all tests of a file."""
    with Template(lasting_processes) as running:
        yield running
