"""The logger of a worker process: ``logging.getLogger("elasticstate")``.

A script that configures logging gets elasticstate's messages in its own handlers. Without a handler, warnings and
errors go to stderr as ``elasticstate: ...``. Importing this module changes no other configuration of logging.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from elasticstate.terminal import complain

logger = logging.getLogger("elasticstate")


class FallbackHandler(logging.Handler):
    """Writer of records to stderr while no other handler receives them, instead of ``logging.lastResort``.

    ``lastResort`` prints the bare text, which does not name its source among the lines of a training script.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_only_handler():
            with suppress(Exception):  # stderr may be closed or None: that must not stop the training
                complain("elasticstate", self.format(record))

    def _is_only_handler(self) -> bool:
        if any(handler is not self for handler in logger.handlers):
            return False
        return not (logger.propagate and logging.getLogger().handlers)


logger.addHandler(FallbackHandler(logging.WARNING))
