"""The address at which Gloo and NCCL of other hosts reach this one: that at which the job sees the host.

Without it, Gloo listens at the address to which the host's name resolves: 127.0.0.1 if it does not resolve, 127.0.1.1
on many Debian systems. No other host reaches these.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from elasticstate.compat.process_groups import use_gloo_address
from elasticstate.errors import CollectiveError, UnreachableError, UsageError
from elasticstate.log import logger
from elasticstate.net.names import interface_addresses, interface_of, is_loopback, refusal, selecting_interface
from elasticstate.options import environment_variable, set_unless_given
from elasticstate.worker.contexts import Rendezvous

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
_NCCL_FAMILY = "NCCL_SOCKET_FAMILY"
_REMOTE = re.compile(r"connectFullMesh failed.*remote=\[([^]]+)]:(\d+)", re.DOTALL)
HOSTS = "Let TCP connections between the hosts pass to all ports: see their firewalls."
_EXPLANATION = "elasticstate/unreachable"
_CAUSE_WAIT_S = 0.5
_LOOK_INTERVAL_S = 0.005
_REASON = re.compile(r"SO_ERROR: ([^,]+),")


def use_for_gloo(local_address: str) -> None:
    """Let Gloo listen at this address, unless the user has chosen interfaces.

    Raises UsageError if the user has chosen an interface that cannot be used.
    """
    for name in _interfaces_for_gloo():
        _require_interface(name, name.__eq__, _GLOO, local_address)
    own = interface_of(local_address)  # it may have several addresses, and the job has chosen one of them
    use_gloo_address(lambda: local_address if _interfaces_for_gloo() in ([], [own]) else "", logger.warning)


def use_for_nccl(local_address: str) -> None:
    """Let NCCL use the interface with this address, unless the user has chosen others.

    NCCL finds a loopback address by itself. Raises UsageError if the user has chosen an interface that cannot be used.
    """
    chosen = environment_variable(_NCCL)
    if chosen and not chosen.startswith("^"):
        wanted = [name.partition(":")[0] for name in chosen.lstrip("=").split(",")]
        is_exact = chosen.startswith("=")

        def fits(interface: str) -> bool:
            return any(interface == name if is_exact else interface.startswith(name) for name in wanted)

        _require_interface(chosen, fits, _NCCL, local_address)
    elif not chosen and not environment_variable("NCCL_COMM_ID") and not _is_in_nccl_files():
        interface = selecting_interface(local_address, in_family=True)
        if interface is not None and not is_loopback(local_address):
            set_unless_given(f"={interface}", _NCCL)
            if ":" in local_address:
                set_unless_given("AF_INET6", _NCCL_FAMILY)


def _is_in_nccl_files() -> bool:
    """Return True if a file with NCCL's settings chooses interfaces. A variable would override it."""
    for path in (environment_variable("NCCL_CONF_FILE") or "~/.nccl.conf", "/etc/nccl.conf"):
        with suppress(OSError, RuntimeError):
            if re.search(rf"^\s*{_NCCL}\s*=", Path(path).expanduser().read_text(errors="replace"), re.MULTILINE):
                return True
    return False


def _interfaces_for_gloo() -> list[str]:
    """Return the user's choice. torch ignores a value of one character."""
    chosen = environment_variable(_GLOO)
    return chosen.split(",") if len(chosen) > 1 else []


def _require_interface(name: str, fits: Callable[[str], bool], variable: str, local_address: str) -> None:
    remedy = (
        f"Set {variable} to an interface by which the other hosts reach this one, or unset it to use {local_address}, "
        "the address at which the job sees this host."
    )
    if why := refusal(fits, name):
        raise UsageError(f"{variable}={environment_variable(variable)}: {why}. {remedy}")


def announce(at: Rendezvous) -> None:
    """Tell the other members at which addresses this one listens, for :func:`explained`."""
    known = interface_addresses()
    chosen = [next((a for a, of in known.items() if of == name), "") for name in _interfaces_for_gloo()]
    at.store.set(key(at.rank), " ".join([at.worker, *chosen, *([at.address] if at.address else [])]))


def key(rank: int) -> str:
    return f"elasticstate/addresses/{rank}"


@contextmanager
def explained(at: Rendezvous) -> Iterator[None]:
    """Raise an error that says which member cannot be reached, instead of torch's.

    UnreachableError: a connection of Gloo has failed. CollectiveError: a member has not connected to the store.
    """
    try:
        yield
    except RuntimeError as error:
        at.check()  # raises if the generation has ended, and all connections are cut
        if found := _REMOTE.search(str(error)):
            text = _explanation(at, found[1], found[2], str(error))
            with suppress(RuntimeError):  # the store is gone, too
                at.store.set(_EXPLANATION, text)
            raise UnreachableError(text) from None
        late: list[int] = []
        if at.rank == 0 and isinstance(error, dist.DistStoreError):
            with suppress(RuntimeError):  # the store is gone
                late = [rank for rank in range(at.size) if not at.store.check([key(rank)])]
        if late:
            raise CollectiveError(
                f"{len(late)} of {at.size} members have not connected to {at.worker} at {at.address} within "
                f"--regroup-timeout of {at.init_timeout.total_seconds():g} s, the first of them rank {late[0]}. {HOSTS}"
            ) from None
        raise


def cause_of(at: Rendezvous, error: str) -> str:
    """Return the text of UnreachableError of the member that has caused this error of a world that does not form, "" if
    none has: Gloo of that member closes its other connections before the member can report its error."""
    deadline = time.monotonic() + _CAUSE_WAIT_S
    with suppress(RuntimeError):  # the generation has ended, or the store is gone
        while "gloo/transport" in error and time.monotonic() < deadline:
            if at.store.check([_EXPLANATION]):
                return (
                    f"{UnreachableError.__module__}.{UnreachableError.__name__}: {at.store.get(_EXPLANATION).decode()}"
                )
            at.check()
            time.sleep(_LOOK_INTERVAL_S)
    return ""


def _explanation(at: Rendezvous, address: str, port: str, error: str) -> str:
    there = _member_at(at, address)
    reason = found[1] if (found := _REASON.search(error)) else "no answer"
    remedy = "A loopback address reaches no other host." if is_loopback(address) else HOSTS
    return (
        f"Gloo of {at.worker} at {at.address} cannot connect to {there} at {address}, port {port}: {reason}. {remedy} "
        f"If the hosts share several networks, set {_GLOO} on each host to the interface of one that connects them."
    )


def _member_at(at: Rendezvous, address: str) -> str:
    """Return the other worker that listens at this address; of several, one."""
    with suppress(RuntimeError):  # the store is gone, too
        for rank in range(at.size):
            if rank != at.rank and at.store.check([key(rank)]):
                worker, *addresses = at.store.get(key(rank)).decode().split()
                if address in addresses:
                    return f"{worker} (rank {rank})"
    return "another worker"
