"""The messages between the MPI parts of worker, driver and agent. They travel inside messages of net/messages.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from elasticstate.core.types import Message
from elasticstate.net import codec
from elasticstate.net.messages import BackendOrder, BackendRequest


class Applicant(NamedTuple):
    """A worker that requests an MPI identity."""

    host: str
    pid: int
    path: str  # of the file that the worker waits for, on its host


class IdentityRequest(Message, frozen=True):
    """Request of a worker to the driver: identities for these workers, which start MPI together."""

    applicants: tuple[Applicant, ...]


class Identity(Message, frozen=True):
    """Order of the driver to an agent: write this MPI identity to the file ``path``, for which a worker waits."""

    path: str
    environment: tuple[tuple[str, str], ...]
    relay_port: int = 0  # port of the relay to mpirun, on the driver's host; 0: mpirun runs on the same host


def as_request(request: IdentityRequest) -> BackendRequest:
    """Return the message by which a worker sends a request to the driver."""
    return BackendRequest(codec.encode(request))


def as_order(identity: Identity) -> BackendOrder:
    """Return the message by which the driver sends an identity to an agent."""
    return BackendOrder(codec.encode(identity))


decode_request: Callable[[bytes], IdentityRequest] = codec.decoder(IdentityRequest)
decode_order: Callable[[bytes], Identity] = codec.decoder(Identity)
