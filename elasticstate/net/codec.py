"""Conversion between messages and bytes. Nothing is ever unpickled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from elasticstate.net import messages


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
