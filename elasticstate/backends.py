"""Backends as plug-ins: the table of backends, and the interface of a backend to driver, agent and ``--check``.

A backend sends tensors between workers. It has a part for each kind of process. A process imports the part of the
job's backend for itself, and no part of any other backend. The interface to workers is in worker/contexts/__init__.py,
because it needs torch.

A backend's parts exchange messages that only they decode: :class:`messages.BackendRequest` from worker to driver, and
:class:`messages.BackendOrder` from driver to agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from elasticstate.plug_ins import load_part

if TYPE_CHECKING:
    from pathlib import Path

    from elasticstate.core.ids import WorkerId
    from elasticstate.core.types import World
    from elasticstate.net.messages import FromAgent, ToAgent
    from elasticstate.net.trust import Trust
    from elasticstate.options import Options


class BackendParts(NamedTuple):
    """Names of the parts of a backend, each as ``module:name``."""

    worker: str  # a worker.contexts.Backend
    driver: str = "elasticstate.backends:DriverBackend"
    agent: str = "elasticstate.backends:AgentBackend"
    check: str = ""  # a function for --check, a check.SearchForBackend; empty: the check of torch covers this backend


BACKENDS = {
    "nccl": BackendParts(worker="elasticstate.worker.contexts.nccl:NcclBackend"),
    "nccl2": BackendParts(worker="elasticstate.worker.contexts.nccl:Nccl2Backend"),
    "gloo": BackendParts(worker="elasticstate.worker.contexts.gloo:GlooBackend"),
    "mpi": BackendParts(
        worker="elasticstate.mpi.worker:MpiBackend",
        driver="elasticstate.mpi.driver_part:MpiDriver",
        agent="elasticstate.mpi.agent_part:MpiAgent",
        check="elasticstate.mpi.installation:search_for_mpi",
    ),
}
"""All backends. The value ``auto`` of ``--backend`` means nccl or gloo, as each worker decides."""


@dataclass(frozen=True, slots=True)
class DriverServices:
    """Services of the driver for its part of a backend."""

    options: Options
    directory: Path  # private directory of the job
    token: str
    is_new_job: bool  # False: this driver continues the job of an earlier one
    has_other_hosts: Callable[[], bool]  # agents of other hosts may connect
    workers: Callable[[], Iterable[WorkerId]]  # all current workers
    send: Callable[[str, ToAgent], object]  # sends a message to the agent of a host
    warn: Callable[[str], None]  # shows a warning to the user


class DriverBackend:
    """Part of a backend in the driver. The methods of this class serve a backend that needs nothing of the driver."""

    packages: ClassVar[dict[str, str]] = {}
    """Python modules that each host needs, with the words that install them by pip."""

    @staticmethod
    def require_installation(start_timeout_s: float) -> None:
        """Raise OptionError if this backend cannot be used on this machine. Runs before the event loop starts."""

    @staticmethod
    def worker_variables() -> dict[str, str]:
        """Return environment variables for all workers."""
        return {}

    def __init__(self, services: DriverServices) -> None: ...

    def request(self, data: bytes) -> None:
        """Handle a request of a worker."""

    def due_messages(self, host: str, message: FromAgent, world: World | None) -> Sequence[FromAgent]:
        """Return the messages of an agent that the driver must handle now, after this ``message`` has arrived.

        A backend may hold messages of a host back, and return them with a later one. ``world``: the newest world.
        """
        return (message,)

    def before_world(self, late_workers: Iterable[WorkerId]) -> None:
        """Prepare for a new world, which is published next. ``late_workers`` have not left the previous one yet."""

    def worker_ended(self, host: str, pid: int) -> None:
        """Handle the end of a worker's process."""

    def host_lost(self, host: str) -> None:
        """Handle the loss of a host's agent. The host may be alive but unreachable."""

    async def stop(self) -> None:
        """Stop all that this part has started, at the end of the job."""


@dataclass(frozen=True, slots=True)
class AgentServices:
    """Services of an agent for its part of a backend."""

    host: str  # name of this host
    connect_timeout_s: float
    trust: Trust
    driver_address: Callable[[], str]  # returns how this host reaches the driver; raises ConnectionError
    warn: Callable[[str], None]  # shows a warning to the user, at the driver
    log: Callable[[str], None]  # writes a log line of the agent


class AgentBackend:
    """Part of a backend in an agent. The methods of this class serve a backend that needs nothing of the agents."""

    def __init__(self, services: AgentServices) -> None: ...

    async def order(self, data: bytes) -> None:
        """Carry out an order of the driver's part."""

    def close(self) -> None:
        """Close all that this part has opened, at the end of the job."""


def driver_part(backend: str) -> type[DriverBackend]:
    """Return the class of the driver's part of a backend."""
    return cast("type[DriverBackend]", load_part(_parts(backend).driver))


def agent_part(backend: str) -> type[AgentBackend]:
    """Return the class of the agents' part of a backend."""
    return cast("type[AgentBackend]", load_part(_parts(backend).agent))


def _parts(backend: str) -> BackendParts:
    return BACKENDS["gloo" if backend == "auto" else backend]  # auto means Gloo or NCCL, with the same parts elsewhere
