"""Hosts that keep the copies of a shard digest: its own ones, then others, in other racks if possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain


class ReplicaHosts:
    """Choice of hosts. All have about the same number of copies, also if racks have different numbers of hosts.

    The hosts form a ring in which each rack is spread evenly, so the next host is in another rack, or soon follows.
    Without racks the ring has the order of discovery.
    """

    def __init__(self, racks: Mapping[str, str], usable: Sequence[str], count: int) -> None:
        """``racks``: of all hosts; "": not known, so no other host shares it. ``usable``: hosts, in the order of
        discovery. ``count``: of copies."""
        self._racks, self._count = racks, count
        self._ring = _ring({name: racks[name] for name in usable})
        self._positions = {name: position for position, name in enumerate(self._ring)}
        self._chosen: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the hosts for a digest that ``own`` hosts have."""
        if own not in self._chosen:  # each host has many slots
            self._chosen[own] = self._choose(own)
        return self._chosen[own]

    def _choose(self, own: tuple[str, ...]) -> tuple[str, ...]:
        chosen = self._in_other_racks((), own)
        if len(chosen) < self._count:
            at = self._positions.get(own[0], -1) + 1
            others = chain(self._ring[at:], self._ring[:at])
            chosen = self._in_other_racks(chosen, (name for name in others if name not in own))
        return chosen

    def _in_other_racks(self, chosen: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
        """Add hosts of racks that have no copy yet, then any others, until there are enough."""
        found, used = list(chosen), {self._racks.get(name, "") for name in chosen} - {""}
        rest = []
        for name in names:
            if len(found) == self._count:
                break
            rack = self._racks.get(name, "")
            if rack in used:
                rest.append(name)
                continue
            found.append(name)
            used |= {rack} - {""}
        return (*found, *rest[: self._count - len(found)])


def _ring(racks: Mapping[str, str]) -> list[str]:
    """Return the hosts such that those of each rack have equal distances."""
    hosts_of: dict[str, list[str]] = {}
    for name, rack in racks.items():
        hosts_of.setdefault(rack or f" {name}", []).append(name)
    if len(hosts_of) == len(racks):
        return list(racks)
    places = {name: (i + 0.5) / len(names) for names in hosts_of.values() for i, name in enumerate(names)}
    return sorted(racks, key=lambda name: places[name])
