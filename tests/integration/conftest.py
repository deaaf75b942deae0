"""Fixtures for tests that start many scripts."""

from __future__ import annotations

import forks
import pytest


@pytest.fixture
def template() -> forks.Template:
    """The process from which scripts fork."""
    return forks.template()
