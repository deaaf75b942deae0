"""What the run loop knows of the way in which tensors travel: a :class:`Backend` per process, a :class:`Context` per
generation. One module (or package) here for each backend; none of them knows the loop, or another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from elasticstate._native import GlooSockets
from elasticstate.config import WorkerEnvironment
from elasticstate.net.messages import FromWorkerBody


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where, as whom and for how long a worker meets the other members of a generation."""

    store: Store  # of this generation alone
    name: str  # of the generation, unlike that of any other: "job/number"
    worker: str  # who this is, in whatever generation
    rank: int
    size: int
    init_timeout: timedelta  # for all members to be there
    collective_timeout: timedelta  # of every group afterwards, those of user code included
    check: Callable[[], None]  # raises CollectiveError once the generation has ended


class Fault(Enum):
    """What an exception says of its generation."""

    UNKNOWN = auto()  # may be the worker's own mistake as well: Gloo's errors are all plain RuntimeErrors
    GENERATION = auto()  # a member is gone, or the generation's communication is
    DEVICE = auto()  # nothing in this process can use its device again: another process has to take over


class Context(Protocol):
    """All process groups of one generation. Made, used and left on the main thread; ``sever`` is for any thread."""

    severs_in_python: bool  # ``sever`` has more to cut than ``sockets``

    @property
    def sockets(self) -> GlooSockets:
        """What the sentinel cuts, without Python."""

    def watch_store(self, address: tuple[str, int]) -> None:
        """From now on ``sever`` also cuts this process's connections to the store at ``address``."""

    def create(self, rendezvous: Rendezvous) -> None:
        """Make the default process group of the generation.

        Raises what the backend raises when a member is missing, or the generation is severed meanwhile.
        """

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """A group of these ranks, ascending, made by them alone; it lasts until ``destroy``."""

    def sever(self) -> None:
        """Cut everything: whoever is inside a collective, an init or a store wait, or enters one, gets an error.

        Level, not edge: it is called again and again until the generation has been left.
        """

    def broken(self) -> bool:
        """The fact behind a failure: the generation's communication is cut, here or by the loss of a member."""

    def classify(self, error: BaseException) -> Fault:
        """What one exception (not its causes) says."""

    def usable(self) -> bool:
        """After a failure: whether this process can be a member of another generation."""

    def destroy(self) -> None:
        """Take the groups down. Nothing of the generation is left afterwards: no thread, no descriptor."""


class Backend(Protocol):
    """One way in which tensors travel, for the life of the process."""

    def prepare(self, environment: WorkerEnvironment, say: Callable[[FromWorkerBody], None]) -> None:
        """What takes time, before the first READY. ``say`` tells the agent something."""

    def context(self) -> Context:
        """For the next generation. The one before it has been destroyed."""
