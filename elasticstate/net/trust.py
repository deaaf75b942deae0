"""Access to ports: a process that has the job's token belongs to the job; others are refused, and limited in number.

Both ends of a connection present a certificate signed by the job's own authority, whose key is derived from the token
(RFC 5869; docs/decisions/control-plane.md). The token is never sent. But an observer of a
handshake can test guessed tokens against its certificates. So a token must be long and random.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import resource
import secrets
import socket
import ssl
import stat
import struct
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from typing import Generic, Protocol, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from elasticstate.errors import OptionError
from elasticstate.net.names import host_port, without_carrier

MIN_TOKEN_LENGTH = 32  # characters
_MOST_TOKEN_BYTES = 4096
NAME = "elasticstate"  # name in all certificates: only the signature matters
_PURPOSE = b"elasticstate: the key of the job's certificate authority"
_STORAGE_PURPOSE = b"elasticstate: the key of what a job keeps in files: "
# Clocks of hosts differ, and a job may run for long. The certificates are as good as the token, and end with it.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)


def make_token() -> str:
    """Return a new token: 256 random bits, as letters, digits, - and _."""
    return secrets.token_urlsafe(32)


def read_token(path: str) -> str:
    """Return the token in a file. Only this user may own or access the file, as ssh demands of a private key.

    Root may own a file that a group of this user reads, as Kubernetes gives the files of a Secret to the group
    ``fsGroup``. Raises OSError (PermissionError: other users own or can access the file), or ValueError if the file
    holds no token.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())  # of the open file: the path may name another file by now
        is_granted = found.st_uid == 0 != os.geteuid() and not found.st_mode & 0o037
        if found.st_uid != os.geteuid() and not is_granted:
            raise PermissionError(
                f"it belongs to user {found.st_uid}, not to this user ({os.geteuid()}). Change its owner, or make a "
                "copy that only this user can read"
            )
        if found.st_mode & 0o077 and not is_granted:
            mode = stat.S_IMODE(found.st_mode)
            raise PermissionError(f"its mode {mode:04o} lets other users read or change it. Run chmod 600 on it")
        data = file.read(_MOST_TOKEN_BYTES + 1)
    token = data.decode(errors="replace").strip() if len(data) <= _MOST_TOKEN_BYTES else ""
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or len(token.split()) > 1:
        raise ValueError(
            f"it contains no token, which is one word of at least {MIN_TOKEN_LENGTH} characters. Copy the driver's file"
        )
    return token


def write_token(path: str) -> str:
    """Make a token, and a file with it that only this user can read. Raises OSError (FileExistsError: it exists)."""
    token = make_token()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # a umask like 777 removes bits from the mode
        file.write(token + "\n")
    return token


def token_of_job(path: str | None) -> str:
    """Return a new token, or the one in the file, which is created if it does not exist. Raises OptionError."""
    if path is None:
        return make_token()
    try:
        return write_token(path)
    except FileExistsError:
        pass
    except OSError as error:
        raise OptionError(
            f"--token-file: {path!r}: cannot be created ({error.strerror}). Choose a path that this user can write to."
        ) from None
    try:
        return read_token(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--token-file: {path!r}: {error}") from None


def storage_key(token: str, job_id: str) -> bytes:
    """Return the key that authenticates commits and results of this job. The key is never in a file."""
    purpose = _STORAGE_PURPOSE + job_id.encode()
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=purpose).derive(token.encode())


class Trust:
    """TLS contexts for both ends, with a certificate of this process. Raises ValueError if the token is too short."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN_LENGTH:
            raise ValueError(f"the token has {len(token)} characters, fewer than {MIN_TOKEN_LENGTH}")
        seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(token.encode())
        authority_key, key = Ed25519PrivateKey.from_private_bytes(seed), Ed25519PrivateKey.generate()
        authority = _certificate(authority_key, authority_key, "elasticstate job", is_authority=True)
        own = _certificate(key, authority_key, NAME, is_authority=False)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, authority, own, key)
        self.server.num_tickets = 0  # connections are never resumed
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, authority, own, key)


def _certificate(key: Ed25519PrivateKey, signer: Ed25519PrivateKey, name: str, is_authority: bool) -> x509.Certificate:
    public, signed_by = key.public_key(), signer.public_key()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elasticstate job")])
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    usage = x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **unused)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(1 if is_authority else x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(signer, None)
    )


def _context(
    protocol: int, authority: x509.Certificate, own: x509.Certificate, key: Ed25519PrivateKey
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    pem = serialization.Encoding.PEM
    context.load_verify_locations(cadata=authority.public_bytes(pem).decode())
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    fd = os.memfd_create("elasticstate-certificate")  # ssl reads only files: this one is in no directory
    try:
        os.write(fd, private + own.public_bytes(pem))
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


# ---------------------------------------------------------------------------------------------------------- local peers
# The user at the other end of a TCP connection on this machine, as reported by the kernel (sock_diag(7)): in 3 µs,
# however many sockets exist. /proc/net/tcp would have to be read completely.


_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_PORTS = struct.Struct("!HH")
_SOCKET = struct.Struct("=III")  # interface, and the cookie: any
_ANSWER = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: ..., user, inode
_ANY = 0xFFFFFFFF
_LONGEST_ANSWER_BYTES = 4096


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without the interface; an IPv4 one if IPv6 only carries it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    return _address(peer[0]).is_loopback or peer[0] == own[0]


class LocalPeers:
    """Refuses connections of other users of this machine. If the kernel does not answer, all are accepted here."""

    def __init__(self) -> None:
        self._number = 0
        self._kernel: socket.socket | None = None
        try:
            self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
            self._kernel.setblocking(False)
        except OSError:  # the kernel lacks it, or a sandbox forbids it
            self.close()

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def refuse(self, connection: socket.socket) -> str:
        """Return why an accepted connection is refused, or "".

        A connection is refused if its other end is known to belong to another user. Root is accepted: root can do
        everything anyway.
        """
        try:
            peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
        except OSError:
            return ""  # the connection has ended, which is reported elsewhere
        if not _is_local(peer, own):
            return ""
        user, is_open = self._ask(connection.family, peer, own)
        if not is_open:
            return "the peer has closed the connection"
        if user in (None, 0, os.geteuid()):
            return ""
        return f"the peer belongs to another user of this machine (user {user})"

    def user_of(self, connection: socket.socket) -> str:
        """Return who is at the other end of an accepted connection: a user of this machine, or another machine.

        A machine has a whole network of IPv6 addresses (RFC 4291, section 2.5.4), so these count as one.
        """
        try:
            peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
        except OSError:
            return ""
        if _is_local(peer, own):
            user, is_open = self._ask(connection.family, peer, own)
            return f"user {user}" if is_open and user is not None else "this machine"
        address = _address(peer[0])
        return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))

    def _ask(
        self, family: socket.AddressFamily, peer: tuple[str, int], own: tuple[str, int]
    ) -> tuple[int | None, bool]:
        """Return the user of the socket connected from ``peer`` to ``own``, and True if a process still has it open.

        The user is None if it is unknown. The kernel finishes a closed connection with user id 0, which looks like
        root's.
        """
        if self._kernel is None:
            return None, True
        self._number = (self._number + 1) & _ANY
        addresses = b"".join(
            socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0") for address in (peer[0], own[0])
        )
        socket_id = _PORTS.pack(peer[1], own[1]) + addresses + _SOCKET.pack(0, _ANY, _ANY)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY) + socket_id
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0)
        try:
            self._kernel.sendto(header + request, (0, 0))
            number = None
            while number != self._number:  # no wait: the kernel has answered within sendto()
                answer = self._kernel.recv(_LONGEST_ANSWER_BYTES)
                _, kind, _, number, _ = _HEADER.unpack_from(answer)
            if kind != _SOCK_DIAG_BY_FAMILY:
                return None, True  # no such socket: an address was translated on the way
            user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        except (OSError, struct.error):
            return None, True
        return user, inode != 0


# ----------------------------------------------------------------------------------------------------------- strangers
# Connections to all ports of a process that have not authenticated. Beyond a limit the oldest one of the user who has
# the most is dismissed, so that a crowd of one user or machine neither locks others out nor takes all descriptors.

MAX_UNAUTHENTICATED = 2048  # limit of unauthenticated connections; each takes up to 70 kB
UNAUTHENTICATED_SHARE = 4  # they may use 1/4 of this process's descriptors: the job needs the rest
BACKLOG = 4096  # connections that the kernel queues until they are accepted
_NO_DESCRIPTOR_PAUSE_S = 0.05  # pause when no descriptor is left
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

M = TypeVar("M")


class Crowd(Generic[M]):
    """Members by their user, in the order of their arrival."""

    def __init__(self) -> None:
        self._users: dict[M, str] = {}
        self._members: dict[str, dict[M, None]] = {}

    def __len__(self) -> int:
        return len(self._users)

    def add(self, member: M, user: str) -> None:
        self._users[member] = user
        self._members.setdefault(user, {})[member] = None

    def discard(self, member: M) -> None:
        user = self._users.pop(member, None)
        if user is not None:
            del self._members[user][member]
            if not self._members[user]:
                del self._members[user]

    def number_of(self, user: str) -> int:
        """Return the number of members of a user."""
        return len(self._members.get(user, ()))

    def first_to_go(self) -> M:
        """Return the oldest member of the user who has the most. There must be a member."""
        largest = max(self._members.values(), key=lambda members: len(members))
        return next(iter(largest))


class Stranger(Protocol):
    """A connection that has not authenticated."""

    def dismiss(self, reason: str, /) -> None:
        """Close the connection, and report the reason."""


class Strangers:
    """The connections to the ports of this process that have not authenticated."""

    def __init__(self, timeout_s: float, refused: Callable[[str, str], None]) -> None:
        """``timeout_s``: limit for the authentication. ``refused(peer, reason)`` reports a refused connection."""
        self.timeout_s = timeout_s
        self.refused = refused
        self._crowd: Crowd[Stranger] = Crowd()

    def __len__(self) -> int:
        return len(self._crowd)

    def add(self, stranger: Stranger, user: str) -> None:
        """Add a connection of this user, or of the machine at this address; dismiss another one if there are too many.

        Call ``remove`` when the connection has authenticated or has ended.
        """
        if len(self._crowd) >= _most():
            self.dismiss_one("too many unauthenticated connections")
        self._crowd.add(stranger, user)

    def remove(self, stranger: Stranger) -> None:
        self._crowd.discard(stranger)

    def dismiss_one(self, reason: str) -> None:
        """Dismiss the oldest connection of the user who has the most, if there is any."""
        if len(self._crowd):
            stranger = self._crowd.first_to_go()
            self._crowd.discard(stranger)
            stranger.dismiss(reason)

    async def accept(self, listener: socket.socket, serve: Callable[[socket.socket, str, LocalPeers], None]) -> None:
        """Accept connections for ever. ``serve(connection, address of the peer, local_peers)`` must not block."""
        loop = asyncio.get_running_loop()
        with closing(LocalPeers()) as local_peers:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno in _FULL:
                        self.dismiss_one(f"the driver cannot hold more connections ({error.strerror})")
                        await asyncio.sleep(_NO_DESCRIPTOR_PAUSE_S)
                else:
                    serve(connection, host_port(without_carrier(address[0]), address[1]), local_peers)
                await asyncio.sleep(0)  # let refused connections close, and agents' messages in


def _most() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_UNAUTHENTICATED
    return max(1, min(MAX_UNAUTHENTICATED, limit // UNAUTHENTICATED_SHARE))
