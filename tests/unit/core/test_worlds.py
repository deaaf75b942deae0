"""The parts of a world that hosts receive: members, keepers, and the sources of a sharded job."""

from __future__ import annotations

from collections import Counter

import msgspec

from elasticstate.core import types as t
from elasticstate.core.worlds import assign, parts_of
from elasticstate.net import messages
from elasticstate.net.link import MAX_DATAGRAM_BYTES

HOST = "node-0123.cluster.example.org"
OPTIONS = t.MemberOptions(60.0, 30.0, False, False)
LINE = t.CommitId(100, 123_456)


def message_with(sources: tuple[t.ShardSource, ...]) -> t.World:
    placement = t.Placement(t.WorkerId(HOST, 0, 1), 0, 0, 1, 0, 0, 1)
    world = t.World(101, (placement,), 1, 0, (), f"{HOST}:5000", line=LINE, sources=sources)
    ((_, message),) = parts_of(world, OPTIONS, {HOST: "10.10.10.10:40000"})
    return message


def test_a_host_receives_its_members_and_its_keeper_and_each_reader_finds_itself() -> None:
    workers = [t.WorkerId(host, slot, 1) for host in "ab" for slot in (4, 6, 7)]
    members = assign([(worker, age) for age, worker in enumerate(workers)])
    lacking = t.as_runs((0, 1, 3, 4, 5))
    world = t.World(7, members, 6, 2, lacking, "a:1", near_runs=t.as_runs((0, 1)), keepers=(2, 4))
    a, b = (part for _, part in parts_of(world, OPTIONS, {}))
    assert (a.members, a.keepers, b.members, b.keepers) == (members[:3], (2,), members[3:], (4,))
    assert (a.size, a.root, a.root_slot, a.lacking, a.near) == (6, 2, 7, (0, 1, 3, 4, 5), (0, 1))
    seen = [msgspec.structs.replace(part, reader=reader) for part in (a, b) for reader in range(3)]
    assert [world.placement for world in seen] == list(members)
    assert [world.follows for world in seen] == [7, 7, None, 6, None, 6]
    assert [world.placement.local_leader for world in seen] == [True, False, False] * 2
    assert a.options == OPTIONS


def test_each_source_comes_with_the_address_of_its_hosts_copy_server() -> None:
    here = t.ShardSource(7, t.CopyOf(HOST, t.SlotId(HOST, 0), LINE))
    elsewhere = t.ShardSource(8, t.CopyOf("b", t.SlotId("b", 0), LINE))
    message = message_with((here, elsewhere))
    assert message.line == LINE
    assert message.sources == (here, elsewhere)
    assert message.copy_servers == ((HOST, "10.10.10.10:40000"), ("b", ""))
    assert messages.decode_to_worker(messages.encode_to_worker(message)) == message


def test_the_sources_of_a_thousand_digests_fit_into_a_datagram() -> None:
    copies = [t.CopyOf(HOST, t.SlotId(HOST, slot), LINE) for slot in range(3000)]
    message = message_with(tuple(t.ShardSource(2**63 + index // 3, copy) for index, copy in enumerate(copies)))
    assert Counter(source.digest for source in message.sources) == {2**63 + digest: 1 for digest in range(1000)}
    assert [source.copy.slot.slot for source in message.sources] == list(range(0, 3000, 3))
    assert len(messages.encode_to_worker(message)) < MAX_DATAGRAM_BYTES
