"""The address at which Gloo listens, the interface that NCCL uses, and the choices of the user."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from elasticstate.compat import process_groups
from elasticstate.compat.process_groups import HashStore
from elasticstate.errors import UnreachableError, UsageError
from elasticstate.net import names
from elasticstate.net.names import own_addresses
from elasticstate.worker.contexts import Rendezvous, addresses

LIMIT = timedelta(seconds=5)
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
OTHER = next(iter(own_addresses()), "127.0.0.3")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Unset the variables, and end the use of an address after the test."""
    for name in (GLOO, NCCL, "NCCL_COMM_ID", "NCCL_SOCKET_FAMILY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    constructor: Any = dist.ProcessGroupGloo.__init__
    yield monkeypatch
    dist.ProcessGroupGloo.__init__ = constructor  # type: ignore[method-assign]


def listening(create: Callable[[], object]) -> set[str]:
    """Return the addresses at which this process listens more than before ``create()``."""

    def look() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("inet")
        return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}

    before = look()
    group = create()
    found = {address for address, _ in look() - before}
    del group
    return found


def gloo() -> Any:
    return dist.ProcessGroupGloo(HashStore(), 0, 1, LIMIT)


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.1", OTHER])
def test_gloo_listens_at_the_address_of_the_host(clean: pytest.MonkeyPatch, address: str) -> None:
    addresses.use_for_gloo(address)
    assert listening(gloo) == {address}
    assert listening(lambda: dist.ProcessGroupGloo(HashStore(), 0, 1, timeout=LIMIT)) == {address}


def test_arguments_that_torch_may_add_are_kept_or_a_warning(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create: Any = dist.ProcessGroupGloo.__init__
    seen: list[dict[str, Any]] = []

    def of_later_torch(group: Any, store: Any, rank: int, size: int, *options: Any, **kwargs: Any) -> None:
        seen.append(kwargs)
        create(group, store, rank, size, *(options or [LIMIT]))

    clean.setattr(dist.ProcessGroupGloo, "__init__", of_later_torch)
    make: Any = dist.ProcessGroupGloo
    addresses.use_for_gloo("127.0.0.2")
    assert listening(lambda: make(HashStore(), 0, 1, timeout=LIMIT, later=False)) == {"127.0.0.2"}
    assert not caplog.text
    assert listening(lambda: make(HashStore(), 0, 1, timeout=LIMIT, later=True)) != {"127.0.0.2"}
    assert seen == [{}, {"timeout": LIMIT, "later": True}]
    assert "has no torch.distributed.ProcessGroupGloo with later, so Gloo uses the address to which" in caplog.text


def test_all_groups_of_torch_listen_there(clean: pytest.MonkeyPatch) -> None:
    addresses.use_for_gloo("127.0.0.2")
    start = lambda: dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # noqa: E731
    try:
        assert listening(start) == {"127.0.0.2"}
        assert listening(dist.new_group) == {"127.0.0.2"}
    finally:
        dist.destroy_process_group()


def test_the_interface_that_the_user_has_chosen_is_kept(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(GLOO, "lo")
    addresses.use_for_gloo("203.0.113.9")
    assert listening(gloo) == {"127.0.0.1"}


def test_on_the_chosen_interface_gloo_listens_at_the_address_of_the_host(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(GLOO, "lo")
    addresses.use_for_gloo("127.0.0.2")
    assert listening(gloo) == {"127.0.0.2"}


def test_options_of_a_group_are_kept(clean: pytest.MonkeyPatch) -> None:
    addresses.use_for_gloo("127.0.0.2")

    def create() -> object:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.4")]
        return dist.ProcessGroupGloo(HashStore(), 0, 1, options)

    assert listening(create) == {"127.0.0.4"}


def test_an_address_that_cannot_be_used_is_a_warning(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses.use_for_gloo("203.0.113.9")
    assert listening(gloo) != {"203.0.113.9"}
    assert "Gloo cannot use 203.0.113.9, the address of this host: Cannot resolve" in caplog.text


def test_the_use_of_an_address_ends(clean: pytest.MonkeyPatch) -> None:
    constructor: Any = dist.ProcessGroupGloo.__init__
    process_groups.use_gloo_address(lambda: "127.0.0.2", print)()
    assert dist.ProcessGroupGloo.__init__ is constructor


@pytest.mark.parametrize(
    ("variable", "value", "use", "problem"),
    [
        (GLOO, "eth77", addresses.use_for_gloo, "this host has no network interface 'eth77', only "),
        (GLOO, "lo,eth77", addresses.use_for_gloo, "this host has no network interface 'eth77', only "),
        (NCCL, "eth77", addresses.use_for_nccl, "this host has no network interface 'eth77', only "),
        (NCCL, "=l", addresses.use_for_nccl, "this host has no network interface '=l', only "),
    ],
)
def test_a_choice_that_does_not_exist_is_an_error_of_one_line(
    clean: pytest.MonkeyPatch, variable: str, value: str, use: Callable[[str], None], problem: str
) -> None:
    clean.setenv(variable, value)
    with pytest.raises(UsageError) as error:
        use("127.0.0.1")
    assert str(error.value).startswith(f"{variable}={value}: {problem}")
    assert len(str(error.value).splitlines()) == 1


def test_an_interface_without_an_address_is_an_error(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(names, "interface_names", lambda: ("lo", "eth0"))
    clean.setenv(GLOO, "eth0")
    clean.setattr(names, "interface_addresses", lambda: {"127.0.0.1": "lo"})
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME=eth0: interface 'eth0' has no address"):
        addresses.use_for_gloo("127.0.0.1")


@pytest.mark.parametrize("value", ["lo", "l", "=lo", "^docker", "^=docker0", "=none,lo", "lo:1234"])
def test_valid_choices_for_nccl_are_kept(clean: pytest.MonkeyPatch, value: str) -> None:
    clean.setenv(NCCL, value)
    addresses.use_for_nccl("10.0.0.1")
    assert os.environ[NCCL] == value


def test_nccl_gets_the_interface_of_the_address(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean.setattr(names, "interface_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.1": "eth0", "fd00::1": "eth0"})
    for address in ("127.0.0.1", "10.0.0.2"):
        addresses.use_for_nccl(address)
        assert NCCL not in os.environ, "NCCL finds a loopback address by itself"
    (tmp_path / "nccl.conf").write_text(f"NCCL_DEBUG=WARN\n{NCCL}=eth1\n")
    addresses.use_for_nccl("10.0.0.1")
    assert NCCL not in os.environ, "it would override the file"
    (tmp_path / "nccl.conf").unlink()
    addresses.use_for_nccl("10.0.0.1")
    assert os.environ.pop(NCCL) == "=eth0"
    assert "NCCL_SOCKET_FAMILY" not in os.environ
    addresses.use_for_nccl("fd00::1")
    assert (os.environ[NCCL], os.environ["NCCL_SOCKET_FAMILY"]) == ("=eth0", "AF_INET6")


def test_an_error_of_gloo_names_both_members_and_a_remedy() -> None:
    store = HashStore()
    at = [Rendezvous(store, "j/1", f"h{r}:0#1", r, 3, LIMIT, LIMIT, lambda: None, f"10.0.0.{r}") for r in range(3)]
    for member in at:
        addresses.announce(member)
    with pytest.raises(UnreachableError) as error, addresses.explained(at[2]):
        raise RuntimeError(
            "Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection refused, "
            "remote=[10.0.0.1]:7076$1"
        )
    first, _, remedy = str(error.value).partition(". ")
    assert first == (
        "Gloo of h2:0#1 at 10.0.0.2 cannot connect to h1:0#1 (rank 1) at 10.0.0.1, port 7076: Connection refused"
    )
    assert "firewall" in remedy
    with pytest.raises(RuntimeError, match="another error"), addresses.explained(at[2]):
        raise RuntimeError("another error")
