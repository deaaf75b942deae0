"""Addresses and interfaces of this machine, compared with those that psutil finds."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from elasticstate.errors import OptionError
from elasticstate.net import names

FOUND = {
    address.address.partition("%")[0]: interface
    for interface, addresses in psutil.net_if_addrs().items()
    for address in addresses
    if address.family in (socket.AF_INET, socket.AF_INET6)
}


def test_all_addresses_with_their_interfaces_are_found() -> None:
    assert names.interface_addresses() == FOUND


def test_all_names_of_interfaces_are_found() -> None:
    assert set(names.interface_names()) == set(psutil.net_if_addrs())


@pytest.mark.parametrize("address", FOUND)
def test_an_own_address_is_this_machine(address: str) -> None:
    assert names.is_this_machine(address)
    assert names.interface_of(address) == FOUND[address]


@pytest.mark.parametrize("own", ["Node7", "node7", "NODE7.cluster.example"])
@pytest.mark.parametrize("host", ["LOCALHOST", "localhost.", "Localhost.LocalDomain", "node7", "NODE7", "Node7."])
def test_an_own_name_in_capitals_or_with_its_last_dot_is_this_machine(
    monkeypatch: pytest.MonkeyPatch, own: str, host: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(names, "_full_names", ["Node7.Cluster.example"])
    assert names.is_this_machine(host)
    assert names.is_this_machine("node7.CLUSTER.example.")
    assert not names.is_this_machine("node7.other.example")
    assert not names.is_this_machine("node70")


@pytest.mark.parametrize("address", [a for a in FOUND if ":" in a])
def test_an_own_address_in_capitals_or_in_full_is_this_machine(address: str) -> None:
    assert names.is_this_machine(address.upper())
    assert names.is_this_machine(ipaddress.ip_address(address).exploded)


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::9", "1.2.3", "fd00", "", "."])
def test_another_address_is_another_machine(host: str) -> None:
    assert not names.is_this_machine(host)
    assert names.interface_of(host) is None
    assert names.selecting_interface(host) is None


def test_a_library_that_takes_an_interface_gets_its_first_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"127.0.0.1": "lo", "10.1.1.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth0", "fd00::1": "eth1"}
    monkeypatch.setattr(names, "interface_addresses", lambda: found)
    selecting = {address: names.selecting_interface(address) for address in (*found, "127.0.0.3", "10.0.0.9")}
    assert selecting == {
        "127.0.0.1": "lo",
        "127.0.0.3": "lo",
        "10.1.1.1": None,
        "10.0.0.1": "eth0",
        "10.0.0.2": None,
        "fd00::1": "eth1",
        "10.0.0.9": None,
    }


def test_the_address_towards_others_is_no_loopback_address() -> None:
    own = names.own_addresses()
    found = names.address_towards(["localhost", "127.0.0.1", *own, "no.such.host.invalid"])
    assert found in own or (not own and not found)


IPV4 = {"127.0.0.1": "lo", "10.0.0.1": "dead", "10.0.1.1": "live"}
IPV6 = {"fe80::1": "live", "fd00::1": "live"}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces of which one has no link, and one has an address that cannot be used yet."""
    new = {"fd00::2": "new"}
    monkeypatch.setattr(
        names, "interface_addresses", lambda without=0: {**IPV4, **IPV6, **({} if without & 0x40 else new)}
    )
    monkeypatch.setattr(names, "interface_names", lambda: ("lo", "dead", "live", "new", "none"))
    monkeypatch.setattr(names, "has_link", lambda name: name in ("lo", "live", "new"))


def test_own_addresses_are_those_that_others_may_reach_first_those_with_a_link(two: None) -> None:
    assert names.own_addresses() == ("10.0.1.1", "10.0.0.1", "fd00::1")
    assert names.own_addresses(("none", "dead")) == ("10.0.0.1",)
    assert names.own_addresses(("dead", "live")) == ("10.0.1.1", "fd00::1")
    assert names.own_addresses(("ib0",)) == names.own_addresses()


@pytest.mark.parametrize(
    ("interfaces", "near", "found"),
    [
        (("live",), "10.0.0.1", ("live", "10.0.1.1")),
        (("live",), "fd00::7", ("live", "fd00::1")),
        (("ib0", "dead", "live"), "127.0.0.1", ("live", "10.0.1.1")),
        (("dead",), "fd00::1", ("dead", "10.0.0.1")),
        (("lo",), "10.0.0.1", ("lo", "127.0.0.1")),
    ],
)
def test_the_first_named_interface_with_a_link_is_taken(
    two: None, interfaces: tuple[str, ...], near: str, found: tuple[str, str]
) -> None:
    assert names.address_on(interfaces, near) == found


@pytest.mark.parametrize(
    ("interfaces", "why"),
    [
        (("ib0", "ib1"), "'ib0,ib1': this host has no network interface 'ib0,ib1', only dead, live, lo, new, none."),
        (("none",), "'none': interface 'none' has no address."),
        (("new",), "'new': interface 'new' has no address that other hosts reach."),
    ],
)
def test_a_host_without_the_named_interface_names_those_that_it_has(
    two: None, interfaces: tuple[str, ...], why: str
) -> None:
    with pytest.raises(OptionError) as error:
        names.address_on(interfaces, "10.0.0.1")
    assert str(error.value).startswith(f"--network-interface: {why} ")


def test_an_interface_has_a_link_or_not() -> None:
    found = {name: names.has_link(name) for name in (*names.interface_names(), "no-such-one")}
    assert found["lo"]
    assert found == {name: stats.isup for name, stats in psutil.net_if_stats().items()} | {"no-such-one": False}


def test_a_socket_at_any_address_takes_both_families() -> None:
    with names.listening_socket(names.any_address()) as listener:
        for address in {"127.0.0.1": 4, **({"::1": 6} if "::1" in FOUND else {})}:
            with socket.create_connection((address, names.port_of(listener)), timeout=5):
                connection, peer = listener.accept()
                connection.close()
            assert names.without_carrier(peer[0]) == address


def test_addresses_are_written_with_their_port() -> None:
    assert [names.host_port(host, 7) for host in ("a", "10.0.0.1", "::1")] == ["a:7", "10.0.0.1:7", "[::1]:7"]
