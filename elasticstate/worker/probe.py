"""Programs of ``--check`` that load torch. They print JSON objects, one per line.

``python -m elasticstate.worker.probe SECONDS`` prints facts about torch. Each object names the next step (``at``), so
that a step that crashes or hangs is known, or a result. After SECONDS, the process prints the stacks of all threads to
stderr and ends.

``python -m elasticstate.worker.probe hosts PARAMETERS`` takes part in an all-reduce over Gloo between hosts. The
parameters are JSON. The process of rank -1 serves the store in which the others meet. Each prints one object with
``error``, "" if all went well, and ``is_cause``, False if another process may know the cause of the error. A signal
ends a process that exceeds the limits below: torch holds the GIL while it connects.
"""

from __future__ import annotations

import faulthandler
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


def main() -> None:
    if sys.argv[1] == "hosts":
        _probe_hosts()
    timeout_s = float(sys.argv[1])
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    _report(at="import torch")
    import torch
    import torch.distributed as dist

    has_nccl = dist.is_available() and dist.is_nccl_available()
    _report(torch=str(torch.__version__), cuda_build=torch.version.cuda or "", rocm_build=torch.version.hip or "")
    _report(has_gloo=dist.is_available() and dist.is_gloo_available(), has_nccl=has_nccl)
    if torch.version.cuda or torch.version.hip:
        _report(at="CUDA")
        _report_devices()
    if has_nccl:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # version of the loaded library
        _report(at="NCCL", nccl=".".join(str(part) for part in version[:3]))
    _report(at="elasticstate's native module")
    import elasticstate._native  # noqa: F401

    if has_nccl:
        from elasticstate.worker.contexts import torch_name

        _report(nccl_names={backend: torch_name(backend) for backend in ("nccl", "nccl2")})
    if dist.is_available() and dist.is_gloo_available():
        _report(at="Gloo")
        _try_gloo(timeout_s)
    _report(at="")


def _report_devices() -> None:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # its error names the cause
        names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        _report(devices=names)
    except (RuntimeError, AssertionError) as error:
        _report(no_cuda=_in_a_line(error))


def _try_gloo(timeout_s: float) -> None:
    """Create and destroy a world of one as a worker does, and run an all-reduce in it."""
    import torch
    import torch.distributed as dist

    from elasticstate.compat.process_groups import TCPStore
    from elasticstate.worker.contexts import Rendezvous
    from elasticstate.worker.contexts.gloo import GlooContext

    timeout = timedelta(seconds=timeout_s)
    context = GlooContext()
    try:
        store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        context.create(Rendezvous(store, "check", "check", 0, 1, timeout, timeout, lambda: None))
        value = torch.ones(1, device="cpu")
        dist.all_reduce(value)
        _report(gloo_works=value.item() == 1)
        context.destroy()
    except Exception as error:  # report any error
        _report(no_gloo=_in_a_line(error))


def _in_a_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _probe_hosts() -> NoReturn:
    parameters = json.loads(sys.argv[2])
    signal.alarm(math.ceil(MEETING_S + EXCHANGE_S + _LAST_MOMENT_S))
    try:
        if parameters["rank"] < 0:
            _serve(parameters["port"], parameters["size"])
        else:
            _exchange(**parameters)
        _end("")
    except (ElasticError, RuntimeError) as failure:
        _end(_in_a_line(failure), isinstance(failure, ElasticError))


def _end(error: str, is_cause: bool = False) -> NoReturn:
    """Report, and end this process at once: the destructor of a group that has failed waits for its peers."""
    _report(error=error, is_cause=is_cause)
    os._exit(0)


def _serve(port: int, size: int) -> None:
    from elasticstate.compat.process_groups import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + MEETING_S + EXCHANGE_S + _LAST_MOMENT_S
    while not store.check([f"done/{rank}" for rank in range(size)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL_S)


def _exchange(
    rank: int,
    size: int,
    port: int,
    host: str,
    servers: list[str],
    address: str,
    variables: dict[str, str],
    interfaces: list[str],
) -> None:
    """Take part in the all-reduce. ``servers``: addresses of the store. ``address``: of this host, "" if not known."""
    import torch
    import torch.distributed as dist

    from elasticstate.compat.process_groups import PrefixStore, TCPStore
    from elasticstate.net.names import address_on, address_towards
    from elasticstate.worker.contexts import Rendezvous, addresses

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
        if interfaces:
            _, address = address_on(interfaces, address)
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
        total = torch.ones(1, device="cpu")
        group.allreduce([total]).wait()
        if total.item() != size:
            raise RuntimeError(f"an all-reduce of {size} ones gave {total.item():g}")
    finally:
        store.set(f"done/{rank}", "")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # skip the cleanup of CUDA and torch: nothing remaining needs it
