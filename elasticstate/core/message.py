"""Message: the base of all messages of the control plane."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages of the control plane: an array ``[tag, field, ...]`` in MessagePack.

    An effect of the core that is sent unchanged is a message itself.
    """
