"""The user of a peer on this machine, as reported by the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticstate.net.names import own_addresses
from elasticstate.net.trust import LocalPeers

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
STRANGER = 65534


@pytest.fixture
def peers() -> Iterator[LocalPeers]:
    peers = LocalPeers()
    yield peers
    peers.close()


@contextmanager
def connection(user: int, host: str = "127.0.0.1", listen: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Yield the accepted end of a connection from a process of this user."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=":" in listen) as listener:
        listener.settimeout(30)
        hold, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(end)
                os.setresuid(user, user, user)
                client = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                client.connect((host, listener.getsockname()[1]))
                os.read(hold, 1)
                client.close()
            finally:
                os._exit(0)
        os.close(hold)
        accepted, _ = listener.accept()
        with accepted:
            yield accepted
        os.close(end)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("host", "listen"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "0.0.0.0"), ("127.0.0.1", "::"), ("::1", "::")]
)
@NEEDS_ROOT
def test_a_process_of_another_user_is_refused(peers: LocalPeers, host: str, listen: str) -> None:
    with connection(STRANGER, host, listen) as accepted:
        assert peers.refuse(accepted) == f"the peer belongs to another user of this machine (user {STRANGER})"


@NEEDS_ROOT
def test_it_is_refused_at_an_address_of_the_machines_own_too(peers: LocalPeers) -> None:
    if not own_addresses():
        pytest.skip("this machine has no address but the loopback one")
    with connection(STRANGER, own_addresses()[0], "0.0.0.0") as accepted:
        assert f"user {STRANGER}" in peers.refuse(accepted)


def test_a_process_of_the_same_user_is_let_in(peers: LocalPeers) -> None:
    with connection(os.getuid()) as accepted:
        assert peers.refuse(accepted) == ""


@NEEDS_ROOT
def test_root_is_let_in_by_any_user(peers: LocalPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    with connection(0) as accepted:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        assert peers.refuse(accepted) == ""


@NEEDS_ROOT
def test_another_user_does_not_pass_for_root_by_closing_at_once(peers: LocalPeers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname()).close()
        accepted, _ = listener.accept()
        with accepted:
            assert peers.refuse(accepted) == "the peer has closed the connection"


def test_where_the_kernel_does_not_answer_nobody_is_refused(peers: LocalPeers) -> None:
    peers.close()
    with connection(os.getuid()) as accepted:
        assert peers.refuse(accepted) == ""
