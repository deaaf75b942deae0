"""Agents that dial in: somebody else has started them."""

from __future__ import annotations

import asyncio


class DialledIn:
    """An agent that this driver did not start."""

    is_local = False

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def ended(self) -> str:
        await self._over.wait()
        return "closed its connection"

    def kill(self) -> None:
        """Stop waiting for it."""
        self._over.set()

    async def clear(self) -> None:
        """Do nothing: processes on another host cannot be killed from here."""
