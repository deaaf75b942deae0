"""Selection of the communicators for a new world. Its members agree on it with a single exchange."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, ReduceOp

from elasticstate.errors import CollectiveError
from elasticstate.mpi.worker import group
from elasticstate.mpi.worker.world_builder import (
    Base,
    Member,
    agree_on_base,
    exchange_members,
    pieces,
    settings,
    take_identity,
)
from elasticstate.net.names import own_addresses
from elasticstate.worker.contexts import Rendezvous

SHORT = timedelta(seconds=10)


def member(worker: str, base: str | None = None, has_identity: bool = True) -> Member:
    return Member(worker, base, has_identity, "h", 1, "/tmp/x")


def at(rank: int, size: int, store: Any = None) -> Rendezvous:
    return Rendezvous(store or HashStore(), "job/2", f"w{rank}", rank, size, SHORT, SHORT, lambda: None)


def test_survivors_are_one_piece_those_who_start_together_another_and_newcomers_each_their_own() -> None:
    members = [
        member("a", "job/1"),
        member("b", has_identity=False),
        member("c", "job/1"),
        member("d"),
        member("e", has_identity=False),
    ]
    assert pieces(members, "job/1") == [[0, 2], [1, 4], [3]]
    assert pieces(members, None) == [[1, 4], [0], [2], [3]]


def test_the_base_of_a_world_is_that_of_its_lowest_rank_that_has_one() -> None:
    members = [member("new"), member("a", "job/1"), member("late", "job/0"), member("b", "job/1")]
    store = HashStore()
    base = Base(None, "job/1", ("a", "b"))  # type: ignore[arg-type]
    assert agree_on_base(at(1, 4, store), members, base) == "job/1"
    for rank in (0, 2, 3):
        assert agree_on_base(at(rank, 4, store), members, None) == "job/1"


def test_a_base_that_one_of_its_members_has_lost_counts_for_nobody() -> None:
    """The communicator could not shrink: the member that has lost it is alive, and does not take part."""
    members = [member("a", "job/1"), member("b")]
    store = HashStore()
    assert agree_on_base(at(0, 2, store), members, Base(None, "job/1", ("a", "b"))) is None  # type: ignore[arg-type]
    assert agree_on_base(at(1, 2, store), members, None) is None


def test_in_a_first_world_there_is_no_base() -> None:
    assert agree_on_base(at(0, 1), [member("a", has_identity=False)], None) is None


def test_members_exchange_their_data() -> None:
    store = HashStore()
    members = [member(f"w{rank}", "job/1" if rank else None, bool(rank)) for rank in range(2)]
    store.set("mpi/0", '{"worker": "w0", "base": null, "has_identity": false, "host": "h", "pid": 1, "path": "/tmp/x"}')
    assert exchange_members(at(1, 2, store), members[1]) == members


def test_an_identity_that_does_not_arrive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="mpirun supplied no identity in time"):
        take_identity(tmp_path / "identity", 0.0, lambda: None)


def test_the_wait_for_an_identity_ends_with_the_generation(tmp_path: Path) -> None:
    def check() -> None:
        raise CollectiveError("the generation has ended")

    with pytest.raises(CollectiveError, match="has ended"):
        take_identity(tmp_path / "identity", float("inf"), check)


def test_a_reduction_that_mpi_does_not_have_is_named() -> None:
    with pytest.raises(CollectiveError, match="PREMUL_SUM"):
        group._mpi_op(ReduceOp.PREMUL_SUM, group.torch.float32)


def test_open_mpi_uses_the_interface_by_which_others_reach_this_host() -> None:
    assert settings("127.0.0.3", {}) == {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi,uct",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }
    for address in own_addresses():
        found = settings(address, {})
        assert found["OMPI_MCA_btl"] == "self,tcp", (
            "of processes on several hosts Open MPI does not know where they are"
        )
        assert found["OMPI_MCA_btl_tcp_if_include"] in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert "OMPI_MCA_btl_tcp_if_include" not in settings("192.0.2.1", {}), "the address of no interface (RFC 5737)"


def test_settings_of_the_user_are_kept() -> None:
    given = {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_btl_tcp_if_exclude": "lo,docker0"}
    assert settings("127.0.0.1", given) == {"OMPI_MCA_pml": "ob1"}
