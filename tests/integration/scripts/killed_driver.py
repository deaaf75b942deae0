"""``elasticrun`` that SIGKILL ends at a given moment of its shutdown: ``killed_driver.py MOMENT ... ARGUMENTS``.

Moments: ``agents``: before it asks the agents to shut down; ``directory``: after the agents have ended and removed
their commits.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from elasticstate.cli import main
from elasticstate.driver.agents import Agents
from elasticstate.driver.record import JobDirectory


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


moment = sys.argv[1]
sys.argv = ["elasticrun", *sys.argv[sys.argv.index("elasticstate") + 1 :]]
if moment == "agents":
    Agents.stop = die  # type: ignore[method-assign]
else:
    JobDirectory.remove = die  # type: ignore[method-assign]
sys.exit(main())
