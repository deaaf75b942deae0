"""What an agent says to a worker, as the worker's socket carries it: a head for the sentinel, and the message."""

from __future__ import annotations

import struct
from enum import IntEnum

from elasticstate.net import codec, messages


class OrderKind(IntEnum):
    """What the sentinel has to know of a message before Python reads it (native/sentinel.hpp has the same numbers)."""

    OTHER = 0
    WORLD = 1
    HOLD = 2
    RELEASE = 3
    END_NOW = 4
    END_AT = 5
    OWN_ERROR = 6
    GATE_OPEN = 7
    LEAVE = 8


ORDER_HEAD = struct.Struct("<QQQ")
"""Before each message to a worker: kind, generation, and tick or the number of a hold (0 where there is none)."""


def encode_to_worker(message: messages.ToWorkerBody) -> bytes:
    """The message as the worker's socket carries it: a head of fixed size for the sentinel, then MessagePack."""
    kind, generation, tick = OrderKind.OTHER, 0, 0
    match message:
        case messages.WorldMessage(generation=generation):
            kind = OrderKind.WORLD
        case messages.HoldOrder(generation, tick):
            kind = OrderKind.HOLD
        case messages.ReleaseOrder(generation):
            kind = OrderKind.RELEASE
        case messages.EndOrder(generation, None, _):
            kind = OrderKind.END_NOW
        case messages.EndOrder(generation, int(tick), _):
            kind = OrderKind.END_AT
        case messages.OwnError(generation):
            kind = OrderKind.OWN_ERROR
        case messages.GateOpen(generation):
            kind = OrderKind.GATE_OPEN
        case messages.LeaveOrder():
            kind = OrderKind.LEAVE
    return ORDER_HEAD.pack(kind, generation, tick) + codec.encode(message)


def decode_to_worker(data: bytes) -> messages.ToWorkerBody:
    """The reverse of :func:`encode_to_worker`. Raises msgspec.DecodeError on rubbish."""
    message: messages.ToWorkerBody = codec.decode_order(data[ORDER_HEAD.size :])
    return message
