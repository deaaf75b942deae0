"""The parameters with which an agent is started."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that an agent reads from its stdin, as one line of JSON: no list of processes may show the token.

    The pipe stays open for as long as its driver lives.
    """

    host: str
    agent: str  # unique id of the agent
    slots: int  # slots that the agent offers; 0: the number from discovery
    addresses: tuple[str, ...]  # addresses of the driver
    token: str
    connect_timeout_s: float
    wait_s: float  # limit of the first search for a driver
    local_address: str  # address at which other hosts reach this one; empty: that of its connection to the driver
    socket: str  # path of the agent's Unix socket for the workers of this host
    directory: str  # working directory of the workers
    job_directory: str  # removed by the driver, or by the last agent if the driver is lost; empty: use an own one
    environment: tuple[tuple[str, str], ...]  # for the workers; the job's variables override these
    rack: str = ""  # of this host; empty: the one from discovery
    is_joining: bool = False  # started by ``elasticrun agent``, perhaps in a terminal, and not by the driver
