"""A name server: ``python name_server.py FILE [NAME]``. NAME is that of all addresses, and has no address itself.

Without NAME it answers nothing. Each question is appended to FILE.
"""

import socket
import struct
import sys

_HEADER = struct.Struct("!6H")
_POINTER = 12  # type PTR (RFC 1035)
_IS_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
_TO_QUESTION, _INTERNET, _SECONDS = 0xC00C, 1, 60


def main() -> None:
    path, *names = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", 53))
        while True:
            packet, client = server.recvfrom(512)
            end = packet.index(b"\0", _HEADER.size) + 5
            question = packet[_HEADER.size : end]
            (kind,) = struct.unpack_from("!H", question, len(question) - 4)
            with open(path, "a") as file:
                file.write(f"{client[0]} {kind} {question[:-5]!r}\n")
            if names:
                server.sendto(_answer(packet, question, kind, names[0]), client)


def _answer(packet: bytes, question: bytes, kind: int, name: str) -> bytes:
    (number,) = struct.unpack_from("!H", packet)
    if kind != _POINTER:
        return _HEADER.pack(number, _NO_SUCH_NAME, 1, 0, 0, 0) + question
    data = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
    record = struct.pack("!HHHIH", _TO_QUESTION, _POINTER, _INTERNET, _SECONDS, len(data)) + data
    return _HEADER.pack(number, _IS_ANSWER, 1, 1, 0, 0) + question + record


main()
