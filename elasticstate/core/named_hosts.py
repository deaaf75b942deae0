"""The hosts that discovery names."""

from __future__ import annotations

from math import inf

from elasticstate.core import types as t
from elasticstate.core.limits import within_limits
from elasticstate.core.records import Draft, Host


def hosts_discovered(d: Draft, event: t.HostsDiscovered) -> None:
    """Enter a new answer of discovery."""
    found, warning = within_limits(event.hosts, d.policy.max_np)
    if warning:
        d.warn(warning)
    for name, known in list(d.hosts.items()):
        if name not in found and known.is_named:
            d.put_host(known, slots=0, is_named=False)
            if known.slots:
                d.note("host_removed", host=name)
    racks = {host.name: host.rack for host in reversed(event.hosts)}
    for order, (name, slots) in enumerate(found.items()):
        before, rack = d.hosts.get(name) or Host(name), racks[name]
        now = (order, slots, True, rack)
        if (before.order, before.slots, before.is_named, before.rack) != now or name not in d.hosts:
            most = max(before.slots_ever, slots)
            d.put_host(before, order=order, slots=slots, is_named=True, rack=rack, slots_ever=most)
        if slots and not before.slots:
            if before.notices:  # the name belongs to another machine now, or the host may be used again
                d.put_host(d.hosts[name], notices=0, cooldown_until=-inf, gives_way_at=-inf)
            if before.agent == "stopping":  # its end starts no preemption cooldown any more
                d.put_host(d.hosts[name], draining="")
            d.note("host_added", host=name, slots=slots)
        elif before.slots and not slots:
            d.note("host_removed", host=name)
