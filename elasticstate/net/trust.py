"""Authentication: a process that has the job's token belongs to the job.

Both ends of a connection present a certificate signed by the job's own authority, and TLS verifies both. The
authority's key is derived from the token (RFC 5869). So each process that has the token can make its own certificate
and verify those of the others. Nothing else has to be distributed, and the token is never sent.

An observer of a handshake can test guessed tokens against its certificates. So a token must be long and random.
"""

from __future__ import annotations

import os
import secrets
import ssl
import stat
from datetime import datetime, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from elasticstate.errors import OptionError

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
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(1 if is_authority else x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(_usage(is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signed_by), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(signer, None)
    )


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
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
