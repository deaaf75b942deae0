"""How an agent is told where its driver is, before there is a connection."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent reads from its stdin, as one line of JSON: the token must not be seen in a list of processes.

    The pipe stays open for as long as its driver lives.
    """

    host: str
    agent: str  # unlike any other agent's
    slots: int  # that it says of itself; 0: as discovery says
    addresses: tuple[str, ...]  # of the driver
    token: str
    connect_timeout_s: float
    wait_s: float  # for a driver, in the first place
    local_address: str  # at which other hosts reach this one; empty: as its connection to the driver shows
    socket: str  # path at which the workers of this host find their agent
    directory: str  # in which the workers run
    job_directory: str  # removed by whoever is last: the driver, or an agent that has lost it; empty: its own
    environment: tuple[tuple[str, str], ...]  # for the workers, before that of the job
