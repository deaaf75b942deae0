"""Addresses and interfaces of this machine, compared with those that psutil finds."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

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
