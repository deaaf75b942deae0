"""``report_metric``: numbers of the user's script for the dashboard and for Prometheus.

A worker sends the newest value of each name at most once a second, by its link to the agent; before ``run``, and in a
plain script, by a connection of its own. The agent adds the values to its next stamps.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import SupportsFloat

import torch

from elasticstate.compat.dtensors import is_dtensor
from elasticstate.errors import UsageError
from elasticstate.net import messages
from elasticstate.net.link import WorkerLink
from elasticstate.options import worker_environment

MOST_NAMES = messages.MOST_METRICS
"""Names that one worker may report."""
LONGEST_NAME = 80
"""Characters of a name."""
INTERVAL_S = 1.0
"""Seconds between two messages, unless a name is new or was not reported for so long."""

_send: Callable[[messages.Metrics], None] | None = None
_link: WorkerLink | None = None  # before ``start``, and in a plain script
_is_worker = True  # until the first value shows that it is not
_sent_at: dict[str, float] = {}  # by name; of all names so far
_newest: dict[str, float | torch.Tensor] = {}  # not sent yet
_due_at = 0.0  # when values that wait may be sent


def report_metric(name: str, value: SupportsFloat) -> None:
    """Show a number of this job, such as a loss, on the dashboard (``--dashboard``) and in ``--metrics``.

    Call it on any rank, as often as you like: a call takes a microsecond or two, and waits for no network. The newest
    value of each name is sent at most once a second; one that came too soon follows with a later call, or with the end
    of a tick. Without ``elasticrun`` it only checks its arguments.

    A tensor on a device is copied there, and read only when it is sent; that waits for the device.

    Args:
        name: a text such as "loss/train". Its unit, if any, is best a part of it: "step time (s)".
        value: a number, or a tensor with one element. NaN and infinity are gaps in the curve.

    Raises UsageError if the name is empty, too long, not printable or one too many (64), or the value is no number.
    """
    now = time.monotonic()
    sent_at = _sent_at.get(name) if isinstance(name, str) else None
    is_new = sent_at is None
    if sent_at is None:
        _check_name(name)
        sent_at = -inf
    is_due = now - sent_at >= INTERVAL_S
    number = _number(name, value, is_due)
    if not _is_worker or (_send is None and not _connect()):
        return
    if is_new:
        _sent_at[name] = -inf
    _newest[name] = number
    if is_due:
        _send_newest(now)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise UsageError(f"report_metric({name!r}, …): the name must be a text, such as 'loss'")
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(
            f"report_metric({name[: LONGEST_NAME + 1]!r}, …): the name must have 1 to {LONGEST_NAME} printable "
            "characters"
        )
    if len(_sent_at) >= MOST_NAMES:
        raise UsageError(
            f"report_metric({name!r}, …): this worker has reported {MOST_NAMES} names already, and no more are shown. "
            "Use a fixed set of names, without numbers of steps or files in them."
        )


def _number(name: str, value: object, is_due: bool) -> float | torch.Tensor:
    """Return the value as a number. One on a device that is not due stays a tensor there."""
    try:
        if isinstance(value, torch.Tensor):
            if is_dtensor(value):  # to read it may need a collective, and not all ranks would be due
                raise TypeError("a DTensor; pass value.full_tensor()")
            if value.numel() != 1:
                raise TypeError(f"a tensor of {value.numel()} elements; pass one element, such as value.mean()")
            if value.is_complex():
                raise TypeError("a complex one")
            if value.device.type != "cpu" and not is_due:
                return value.detach().clone()  # its owner may change it in place
        elif isinstance(value, str | bytes):
            raise TypeError("a text")
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"report_metric({name!r}, {type(value).__name__}): the value is no number: {error}") from None


def start(send: Callable[[messages.Metrics], None]) -> None:
    """Send with ``send`` from now on."""
    global _send, _link, _is_worker
    link, _link, _send, _is_worker = _link, None, send, True
    if link is not None:
        link.close()


def end_tick() -> None:
    """Send the values that came too soon, if they are due now."""
    if _newest and (now := time.monotonic()) >= _due_at:
        _send_newest(now)


def end() -> None:
    """Send all values: no tick follows."""
    if _newest:
        _send_newest(time.monotonic())


def _send_newest(now: float) -> None:
    global _due_at
    if _send is None:
        return
    values = []
    for name in list(_newest):  # other threads may report values meanwhile
        value = _newest.pop(name, None)
        if value is not None:
            with suppress(RuntimeError):  # the device has failed; its next operation says so
                values.append((name, float(value)))
            _sent_at[name] = now
    _due_at = now + INTERVAL_S
    _send(messages.Metrics(tuple(values)))


def _connect() -> bool:
    """Connect to the agent, if there is one. Return False if this process is no worker."""
    global _link, _send, _is_worker
    environment = worker_environment()
    if environment is not None:
        with suppress(OSError):
            link = WorkerLink(environment.socket)
            link.connect()
            link.send(messages.Metrics((), environment.worker, messages.PROTOCOL_VERSION))
            _link, _send = link, link.try_send
    _is_worker = _send is not None
    return _is_worker


def _in_child() -> None:
    """Report nothing from a child of a worker. The template process is none: its children become workers."""
    global _is_worker
    _is_worker = _send is None
    _newest.clear()


os.register_at_fork(after_in_child=_in_child)
atexit.register(end)
