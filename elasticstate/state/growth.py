"""Growth of a buffer on a thread, because the kernel clears each new page, and a world waits for its first commit."""

from __future__ import annotations

import threading

from elasticstate.log import logger
from elasticstate.state.buffer import Buffer


class Growth:
    """Growth of one buffer, which no other thread uses before ``wait`` has returned."""

    def __init__(self, buffer: Buffer, size_bytes: int) -> None:
        self._thread = threading.Thread(target=self._grow, args=(buffer, size_bytes), name="elasticstate-growth")
        self._thread.start()

    @staticmethod
    def _grow(buffer: Buffer, size_bytes: int) -> None:
        try:
            buffer.grow_ahead(size_bytes)
        except Exception as error:  # the commit needs the memory, and raises the error
            logger.debug("buffer %d has not grown to %d bytes ahead: %s", buffer.index, size_bytes, error)

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()
