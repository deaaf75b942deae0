"""Names that mean this machine, and commands that start agents on other hosts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from elasticstate.launchers import HostLaunchers
from elasticstate.launchers.command import SshLauncher
from elasticstate.net.names import (
    address_of,
    is_loopback,
    is_this_machine,
    own_addresses,
)
from elasticstate.options import Options, read_options


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "127.3.2.1", socket.gethostname()])
def test_names_of_this_machine_need_no_ssh(host: str) -> None:
    assert HostLaunchers(options()).refuse(host) == ""


@pytest.mark.parametrize("host", ["far.example", "10.0.0.1", "127.0.0", "localhost2"])
def test_other_names_need_ssh(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_this_machine(host)
    monkeypatch.setenv("PATH", "")
    assert (
        HostLaunchers(options())
        .refuse(host)
        .startswith(f"host {host!r} is another machine, and this machine has no ssh")
    )


def test_own_addresses_are_no_loopback() -> None:
    assert not any(is_loopback(address) for address in own_addresses())


def test_addresses() -> None:
    assert address_of("127.0.0.2") == "127.0.0.2"
    assert address_of("localhost") == "127.0.0.1"
    assert address_of(socket.gethostname()) == "127.0.0.1"


def options(**given: str) -> Options:
    return read_options({"np": "1", **given}, ["c"], {})


def ssh_command(chosen: Options) -> list[str]:
    return SshLauncher(chosen).command("far", ("-m", "elasticstate.agent"), Path("log"), "start")


def test_the_ssh_command_leaves_host_keys_port_and_key_to_the_configuration_of_ssh() -> None:
    command = ssh_command(options())
    assert command[0] == "ssh"
    assert command[-3:] == ["--", "far", f"exec {sys.executable} -m elasticstate.agent"]
    assert "BatchMode=yes" in command
    assert "ConnectTimeout=10" in command
    assert not [word for word in command if "HostKey" in word or "KnownHosts" in word or word in ("-p", "-i")]
    assert "ConnectTimeout=1" in ssh_command(options(heartbeat_timeout_s="0.5"))


def test_port_and_key_are_passed_on_to_ssh() -> None:
    command = ssh_command(options(ssh_port="2222", ssh_identity_file="/key"))
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == "/key"
