"""``python -m elasticstate.worker.probe SECONDS``: print facts about torch, as JSON objects, one per line.

Each object names the next step (``at``) or a result. So the objects before it identify a step that crashes or hangs.
After SECONDS, the process prints the stacks of all threads to stderr and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from datetime import timedelta


def main() -> None:
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
        _report(at="NCCL", nccl=_nccl_version())
    _report(at="elasticstate's native module")
    import elasticstate._native  # noqa: F401

    if has_nccl:
        _report(nccl_names=_nccl_names())
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


def _nccl_version() -> str:
    import torch

    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # version of the loaded library
    return ".".join(str(part) for part in version[:3])


def _nccl_names() -> dict[str, str]:
    """Return torch's names of the backends that use NCCL, by those of elasticstate."""
    from elasticstate.worker.contexts.nccl import torch_name

    return {backend: torch_name(backend) for backend in ("nccl", "nccl2")}


def _try_gloo(timeout_s: float) -> None:
    """Create and destroy a world of one as a worker does, and run an all-reduce in it."""
    import torch
    import torch.distributed as dist

    from elasticstate.compat.process_groups import TCPStore
    from elasticstate.worker.contexts.context import Rendezvous
    from elasticstate.worker.contexts.gloo import GlooContext

    timeout = timedelta(seconds=timeout_s)
    context = GlooContext()
    try:
        store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        context.create(Rendezvous(store, "check", "check", 0, 1, timeout, timeout, lambda: None))
        value = torch.ones(1)
        dist.all_reduce(value)
        _report(gloo_works=value.item() == 1)
        context.destroy()
    except Exception as error:  # report any error
        _report(no_gloo=_in_a_line(error))


def _in_a_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # skip the cleanup of CUDA and torch: nothing remaining needs it
