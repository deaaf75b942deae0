"""Plan of faults, drawn in advance from a seed. The same seed and minutes give the same plan. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

HEARTBEAT_S = 2.0  # --heartbeat-timeout of the job; some faults are shorter, others longer
GAP_S = (0.3, 4.1)  # between two faults; 2.2 on average, because some faults find no target
MOST_AFFLICTED = 2  # hosts at a time; one of three continues to train
REST_S = 2.0  # pause of a host between faults: several short absences must not add up to more than --orphan-timeout


@dataclass(frozen=True)
class Kind:
    """A kind of fault. ``hosts``: number of hosts that cannot work while it lasts; 0 if only processes are hit."""

    hosts: int = 0
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "kill_worker": Kind(),
    "kill_rank_0": Kind(),
    "kill_workers_of_host": Kind(),
    "kill_all_workers": Kind(),
    "pause_worker": Kind(lasts_s=(0.1, HEARTBEAT_S / 2)),
    "freeze_worker": Kind(lasts_s=(1.5 * HEARTBEAT_S, 4 * HEARTBEAT_S)),
    "drain_worker": Kind(),
    "drain_agent": Kind(1, (2.0, 8.0)),
    "kill_agent": Kind(),
    "freeze_agent": Kind(lasts_s=(0.2, 4 * HEARTBEAT_S)),
    "kill_driver": Kind(lasts_s=(0.1, 4.0)),
    "power_off": Kind(1, (0.5, 6.0)),
    "cut": Kind(1, (0.2, 10.0)),
    "mute": Kind(1, (0.5, 8.0)),
    "deafen": Kind(1, (0.5, 8.0)),
    "part_from_driver": Kind(1, (0.5, 8.0)),
    "cut_two": Kind(2, (0.5, 6.0)),
    "part_two": Kind(2, (0.5, 8.0)),
    "lose_packets": Kind(1, (1.0, 6.0)),
    "take_host": Kind(1, (0.5, 6.0)),
}


@dataclass(frozen=True)
class Fault:
    """A planned fault. ``targets``: indices of hosts if ``kind.hosts`` > 0, else a number that selects a process."""

    at_s: float
    kind: str
    targets: tuple[int, ...]
    lasts_s: float
    share: float  # of the packets that are lost

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s: {self.kind} {','.join(map(str, self.targets))}{lasts}"


def make_plan(seed: int, minutes: float, hosts: int) -> list[Fault]:
    """Plan all kinds once in random order, then all again, and so on. All faults are repaired in time.

    A kind for which too few hosts are free follows as soon as enough are free.
    """
    random = Random(f"{seed} {minutes:g} {hosts}")
    end_s = 60 * minutes
    afflicted: dict[int, float] = {}  # host -> time until which it is afflicted
    plan: list[Fault] = []
    deck: list[str] = []
    now = random.uniform(*GAP_S)
    while now < end_s:
        free = [host for host in range(hosts) if afflicted.get(host, 0.0) <= now]
        may = MOST_AFFLICTED - (hosts - len(free))
        if not any(KINDS[kind].hosts <= may for kind in deck):
            deck += random.sample(sorted(KINDS), len(KINDS))
        kind = next(kind for kind in deck if KINDS[kind].hosts <= may)
        deck.remove(kind)
        fault = _draw(random, now, kind, free, end_s)
        if KINDS[kind].hosts:
            afflicted.update(dict.fromkeys(fault.targets, now + fault.lasts_s + REST_S))
        plan.append(fault)
        now += random.uniform(*GAP_S)
    return plan


def _draw(random: Random, now: float, kind: str, free: list[int], end_s: float) -> Fault:
    count = KINDS[kind].hosts
    targets = tuple(random.sample(free, count)) if count else (random.randrange(1000),)
    lasts_s = min(random.uniform(*KINDS[kind].lasts_s), end_s - now)
    return Fault(round(now, 3), kind, targets, round(lasts_s, 3), round(random.uniform(0.02, 0.3), 3))


def tally(kinds: Iterator[str]) -> dict[str, int]:
    """Count the faults of each kind, including kinds with none."""
    counts = dict.fromkeys(KINDS, 0)
    for kind in kinds:
        counts[kind] += 1
    return counts
