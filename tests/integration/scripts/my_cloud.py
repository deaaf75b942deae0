"""A host source and a launcher of a third party, which a test installs with entry points."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import Hosts, HostSource
from elasticstate.launchers.command import CommandLauncher

_DIRECTORY = Path(os.environ.get("MY_CLOUD", "."))


class MyHosts(HostSource):
    """One slot for each word in a file."""

    async def hosts(self) -> Hosts:
        return tuple(HostSlots(name, 1) for name in (_DIRECTORY / "hosts").read_text().split())


class MyLauncher(CommandLauncher):
    """Starts agents on this machine, and records that."""

    def command(self, host: str, arguments: Sequence[str], log: Path, name: str) -> list[str]:
        with open(_DIRECTORY / "started", "a") as started:
            started.write(f"{host}\n")
        return [self.python, *arguments]


def no_class(options: object) -> None:
    """Return nothing: an entry point that names no class."""
