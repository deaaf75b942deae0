"""Conversion between messages and bytes. Nothing is ever unpickled here."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec

from elasticstate.net import messages

# ---------------------------------------------------------------------------------------------------------------- codec


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a decoder that raises msgspec.DecodeError on any malformed message.

    msgspec's own decoder raises UnicodeDecodeError for text that is not UTF-8.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def strict(data: bytes) -> Any:
        try:
            return decode(data)
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(str(error)) from None

    return strict


encode = msgspec.msgpack.Encoder().encode
decode_from_worker = decoder(messages.FromWorkerBody)
decode_for_worker = decoder(messages.ToWorkerBody)
decode_opening = decoder(messages.Opening)
decode_from_agent = decoder(messages.FromAgent)
decode_to_agent = decoder(messages.ToAgent)


# --------------------------------------------------------------------------------------------------------- worker codec
# Encoding of messages from an agent to a worker: a head for the sentinel, and the message.


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
        case messages.World(generation=generation):
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
    return MESSAGE_HEAD.pack(kind, generation, tick) + encode(message)


def decode_to_worker(data: bytes) -> messages.ToWorkerBody:
    """Decode the result of :func:`encode_to_worker`. Raises msgspec.DecodeError on a malformed message."""
    message: messages.ToWorkerBody = decode_for_worker(data[MESSAGE_HEAD.size :])
    return message
