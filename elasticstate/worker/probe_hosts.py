"""``python -m elasticstate.worker.probe_hosts PARAMETERS``: an all-reduce over Gloo between hosts, for ``--check``.

The parameters are JSON. The process of rank -1 serves the store in which the others meet. Each prints one JSON object
with ``error``, which is empty if all went well, and ``is_cause``, which is False if another process may know the cause
of the error. A signal ends a process that exceeds the limits below: torch holds the GIL while it connects.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from elasticstate.errors import ElasticError, UnreachableError
from elasticstate.options import set_unless_given

MEETING_S = 30.0  # limit until all processes have imported torch and connected to the store
EXCHANGE_S = 10.0  # limit of the all-reduce
_ATTEMPT = timedelta(seconds=1)
_LOOK_INTERVAL_S = 0.05
_LAST_MOMENT_S = 3.0  # for an error of torch's own


def main() -> NoReturn:
    parameters = json.loads(sys.argv[1])
    signal.alarm(math.ceil(MEETING_S + EXCHANGE_S + _LAST_MOMENT_S))
    try:
        if parameters["rank"] < 0:
            _serve(parameters["port"], parameters["size"])
        else:
            _exchange(**parameters)
        _end("")
    except (ElasticError, RuntimeError) as failure:
        lines = str(failure).strip().splitlines()
        _end(lines[0] if lines else type(failure).__name__, isinstance(failure, ElasticError))


def _end(error: str, is_cause: bool = False) -> NoReturn:
    """Report, and end this process at once: the destructor of a group that has failed waits for its peers."""
    print(json.dumps({"error": error, "is_cause": is_cause}), flush=True)
    os._exit(0)


def _serve(port: int, size: int) -> None:
    from elasticstate.compat.process_groups import TCPStore

    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + MEETING_S + EXCHANGE_S + _LAST_MOMENT_S
    while not store.check([f"done/{rank}" for rank in range(size)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL_S)


def _exchange(
    rank: int, size: int, port: int, host: str, servers: list[str], address: str, variables: dict[str, str]
) -> None:
    """Take part in the all-reduce. ``servers``: addresses of the store. ``address``: of this host, "" if not known."""
    import torch
    import torch.distributed as dist

    from elasticstate.compat.process_groups import PrefixStore, TCPStore
    from elasticstate.net.names import address_towards
    from elasticstate.worker.contexts import addresses
    from elasticstate.worker.contexts.context import Rendezvous

    for name, value in variables.items():
        set_unless_given(value, name)
    deadline = time.monotonic() + MEETING_S
    store = None
    while store is None:
        for server in servers:
            with suppress(RuntimeError):
                store = TCPStore(server, port, is_master=False, wait_for_workers=False, timeout=_ATTEMPT)
                address = address or address_towards([server])
                break
        else:
            if time.monotonic() > deadline:
                raise UnreachableError(f"cannot connect to this machine at {' or '.join(servers)}. {addresses.HOSTS}")
    try:
        limit = timedelta(seconds=EXCHANGE_S)
        at = Rendezvous(PrefixStore("check", store), "check", host, rank, size, limit, limit, lambda: None, address)
        addresses.use_for_gloo(address)
        addresses.announce(at)
        while not at.store.check([addresses.key(other) for other in range(size)]):
            if any(store.check([f"done/{other}"]) for other in range(size)) or time.monotonic() > deadline:
                raise RuntimeError("the other hosts cannot take part")
            time.sleep(_LOOK_INTERVAL_S)
        signal.alarm(math.ceil(EXCHANGE_S + _LAST_MOMENT_S))
        store.set_timeout(limit)
        with addresses.explained(at):
            group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", at.store), rank, size, limit)
        total = torch.ones(1)
        group.allreduce([total]).wait()
        if total.item() != size:
            raise RuntimeError(f"an all-reduce of {size} ones gave {total.item():g}")
    finally:
        store.set(f"done/{rank}", "")


if __name__ == "__main__":
    main()
