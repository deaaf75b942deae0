"""Encoding of messages from an agent to a worker: a head for the sentinel, and the message."""

from __future__ import annotations

import struct
from enum import IntEnum

from elasticstate.net import codec, messages


class MessageKind(IntEnum):
    """The kind of a message, which the sentinel needs before Python reads it (same numbers in native/sentinel.hpp)."""

    OTHER = 0
    WORLD = 1
    HOLD = 2
    RELEASE = 3
    END_NOW = 4
    END_AT = 5
    CONFIRM_OWN_ERROR = 6
    OPEN_GATE = 7
    LEAVE = 8
    TERMINATE = 9
    ASK_WHERE = 10


MESSAGE_HEAD = struct.Struct("<QQQ")
"""Head of each message to a worker: kind, generation, and tick or number of a hold (0 if there is none)."""


def encode_to_worker(message: messages.ToWorkerBody) -> bytes:
    """Encode a message for the worker's socket: a head of fixed size for the sentinel, then MessagePack."""
    kind, generation, tick = MessageKind.OTHER, 0, 0
    match message:
        case messages.WorldMessage(generation=generation):
            kind = MessageKind.WORLD
        case messages.Hold(generation, tick):
            kind = MessageKind.HOLD
        case messages.Release(generation):
            kind = MessageKind.RELEASE
        case messages.End(generation, None, _):
            kind = MessageKind.END_NOW
        case messages.End(generation, int(tick), _):
            kind = MessageKind.END_AT
        case messages.ConfirmOwnError(_, generation):
            kind = MessageKind.CONFIRM_OWN_ERROR
        case messages.OpenGate(generation):
            kind = MessageKind.OPEN_GATE
        case messages.Leave():
            kind = MessageKind.LEAVE
        case messages.Terminate(generation):
            kind = MessageKind.TERMINATE
        case messages.AskWhere(generation):
            kind = MessageKind.ASK_WHERE
    return MESSAGE_HEAD.pack(kind, generation, tick) + codec.encode(message)


def decode_to_worker(data: bytes) -> messages.ToWorkerBody:
    """Decode the result of :func:`encode_to_worker`. Raises msgspec.DecodeError on a malformed message."""
    message: messages.ToWorkerBody = codec.decode_for_worker(data[MESSAGE_HEAD.size :])
    return message
