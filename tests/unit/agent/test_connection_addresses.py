"""The order in which an agent dials the addresses of its driver."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elasticstate.agent.__main__ import with_ssh_client_first
from elasticstate.net.messages import Launch

LAUNCH = Launch("h", "id", 0, (), "t", 1.0, 1.0, "", "", "/", "", ())
BOTH = ("10.0.0.1:7", "127.0.0.1:7", "[fd00::1]:7")


@pytest.mark.parametrize(
    ("client", "addresses", "order"),
    [
        ("", BOTH, BOTH),
        ("10.0.0.9", BOTH, ("10.0.0.9:7", *BOTH)),
        ("10.0.0.1", BOTH, BOTH),
        ("fd00::9", BOTH, ("10.0.0.1:7", "127.0.0.1:7", "[fd00::9]:7", "[fd00::1]:7")),
        ("fd00::9", ("[fd00::1]:7", "127.0.0.1:7"), ("[fd00::9]:7", "[fd00::1]:7", "127.0.0.1:7")),
        ("fe80::9%eth0", BOTH, BOTH),
    ],
)
def test_the_address_of_ssh_is_the_first_of_its_family(
    monkeypatch: pytest.MonkeyPatch, client: str, addresses: tuple[str, ...], order: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", f"{client} 5000 10.0.0.2 22")
    assert with_ssh_client_first(replace(LAUNCH, addresses=addresses)).addresses == order
