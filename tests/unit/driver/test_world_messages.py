"""WorldViews of a sharded job: the line with its sources and the addresses of the copy servers."""

from __future__ import annotations

from collections import Counter

from elasticstate.core import types as t
from elasticstate.driver.spec import world_messages
from elasticstate.net import codec, messages
from elasticstate.net.link import MAX_DATAGRAM_BYTES
from elasticstate.options import Options

HOST = "node-0123.cluster.example.org"
LINE = t.CommitId(100, 123_456)


def message_with(sources: tuple[t.ShardSource, ...]) -> messages.WorldView:
    placement = t.Placement(t.WorkerId(HOST, 0, 1), 0, 0, 1, True, 0, 1)
    world = t.World(101, (placement,), 0, (), f"{HOST}:5000", line=LINE, sources=sources)
    options = Options(command=("train",), np=1, min_np=1, max_np=1)
    ((_, on_host),) = world_messages("job", world, options, {HOST: "10.10.10.10:40000"})
    ((_, message),) = on_host.worlds
    return message


def test_each_source_comes_with_the_address_of_its_hosts_copy_server() -> None:
    here = t.ShardSource(7, t.CopyOf(HOST, t.SlotId(HOST, 0), LINE))
    elsewhere = t.ShardSource(8, t.CopyOf("b", t.SlotId("b", 0), LINE))
    message = message_with((here, elsewhere))
    assert message.line == LINE
    assert message.sources == ((here, "10.10.10.10:40000"), (elsewhere, ""))
    assert codec.decode_to_worker(codec.encode_to_worker(message)) == message


def test_the_sources_of_a_thousand_digests_fit_into_a_datagram() -> None:
    copies = [t.CopyOf(HOST, t.SlotId(HOST, slot), LINE) for slot in range(3000)]
    message = message_with(tuple(t.ShardSource(2**63 + index // 3, copy) for index, copy in enumerate(copies)))
    assert Counter(source.digest for source, _ in message.sources) == {2**63 + digest: 1 for digest in range(1000)}
    assert [source.copy.slot.slot for source, _ in message.sources] == list(range(0, 3000, 3))
    assert len(codec.encode_to_worker(message)) < MAX_DATAGRAM_BYTES
