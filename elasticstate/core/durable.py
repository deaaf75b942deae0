"""Durable copies, as far as the core knows them: where a world without any commit gets its state."""

from __future__ import annotations

from elasticstate.core.message import Message


class DurableSource(Message, frozen=True):
    """Storage with durable copies, from which the root of a world reads the newest one.

    ``is_required``: the job has committed, so it must not begin anew.
    """

    place: str  # path or URL
    timeout_s: float  # without progress
    is_required: bool
