"""``horovod.run``: run a function in a job of workers, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import elasticstate
from elasticstate.horovod.calls import ArgumentUsageError


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | Iterable[str] | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``func(*args, **kwargs)`` in ``num_proc`` workers, and return the results, one for each rank.

    ``func`` calls ``init()`` and collectives, with or without ``elastic.run``. It is pickled by value if it is defined
    in a script or a notebook. The options have the meanings of ``elasticrun --horovod``: without ``min_num_proc`` and a
    discovery script, the first failure of a worker ends the job.

    Args:
        func, args, kwargs: function to call in each worker, and its arguments.
        num_proc, min_num_proc, max_num_proc: number of workers to start with, fewest, most. Also ``np``, ``min_np`` and
            ``max_np``.
        slots: slots of a host that is named without a number (``--slots-per-host``).
        output_filename: directory for the output of the workers (``--log-dir``).
        disable_cache: ignored.
        network_interface: names of interfaces, separated by commas (``--network-interface``).
        mpi_args, executable: must be None.
        options: any other option of ``elasticrun`` by its name: ``host_discovery_script="./hosts.sh"``.

    Raises UsageError for arguments that cannot have an effect, and what ``elasticstate.launch`` raises: a
    WorkerFailedError with the root cause, if the job fails.
    """
    refused = {
        "mpi_args": (mpi_args, "elasticrun calls mpirun itself. Leave it out."),
        "executable": (executable, "the workers run with this Python, which other hosts must have at the same path."),
    }
    for name, (value, remedy) in refused.items():
        if value is not None:
            raise ArgumentUsageError(f"run({name}={value!r}): {remedy}")
    if use_gloo and use_mpi:
        raise ArgumentUsageError("run(use_gloo=True, use_mpi=True): they exclude each other. Give only one of them.")
    backend = "gloo" if use_gloo else "mpi" if use_mpi else None
    given: dict[str, Any] = {
        "min_np": min_np if min_num_proc is None else min_num_proc,
        "max_np": max_np if max_num_proc is None else max_num_proc,
        "slots_per_host": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "hosts": hosts,
        "hostfile": hostfile,
        "start_timeout": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "log_dir": output_filename,
        "verbose": bool(verbose) or None,
        "backend": backend,
        "network_interface": network_interface,
        **options,
    }
    workers = np if np is not None and num_proc == 1 else num_proc
    return elasticstate.launch(func, args, kwargs, np=workers, horovod=True, **given)
