"""Which names mean this machine."""

from __future__ import annotations

import socket

import pytest

from elasticstate.driver.launcher import refuse
from elasticstate.net.names import address_of


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "127.3.2.1", socket.gethostname()])
def test_names_of_this_machine_are_taken(host: str) -> None:
    assert refuse(host) == ""


@pytest.mark.parametrize("host", ["far.example", "10.0.0.1", "127.0.0", "localhost2"])
def test_other_names_are_refused_with_the_reason(host: str) -> None:
    assert refuse(host) == f"host {host!r} is not this machine; remote hosts come with ssh support"


def test_addresses() -> None:
    assert address_of("127.0.0.2") == "127.0.0.2"
    assert address_of("localhost") == "127.0.0.1"
    assert address_of(socket.gethostname()) == "127.0.0.1"
