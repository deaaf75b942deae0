"""The core, driven by lines of its script language: jobs to begin with, and views of the effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticstate.core import types as t
from elasticstate.core.accounting import figures_of
from elasticstate.core.state import Membership
from elasticstate.core.step import new_membership, step
from tests.kit.policy import policy_of
from tests.kit.transcripts import parse_event

POLICY = policy_of(np=3, min_np=2, max_np=3, preemption_window_s=0.0)
RUNNING = """
0.0 hosts a:3
0.1 agent-joined a
1.0 ready a:0#1 + ready a:1#1 + ready a:2#1
1.1 first a:0#1 in=1
"""


def drive(script: str, m: Membership | None = None, **policy: object) -> tuple[Membership, list[t.Effect]]:
    """Return the membership after the script, and all effects of its last line."""
    m = m or new_membership(replace(POLICY, **policy))  # type: ignore[arg-type]
    effects: tuple[t.Effect, ...] = ()
    for line in script.strip().splitlines():
        at, _, events = line.strip().partition(" ")
        parts = tuple(parse_event(event.split()) for event in events.split(" + "))
        m, effects, _ = step(m, t.Several(parts), float(at))
    return m, list(effects)


def kinds(effects: list[t.Effect]) -> list[str]:
    return [effect.event if isinstance(effect, t.Note) else type(effect).__name__ for effect in effects]


def only(effects: list[t.Effect], kind: type[t.Effect]) -> t.Effect:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def ended(effects: list[t.Effect]) -> t.EndJob:
    found = only(effects, t.EndJob)
    assert isinstance(found, t.EndJob)
    return found


def published(effects: list[t.Effect]) -> t.World:
    found = only(effects, t.World)
    assert isinstance(found, t.World)
    return found


TWO = {"np": 2, "min_np": 1, "max_np": 2}
# 1 s of boot. The world exists at 1.0; its groups at 1.2 (0.2 s), the state at 1.5 (0.3 s), the first tick at 2.0.
START = """
0.0 hosts a:2
0.1 agent-joined a
1.0 ready a:0#1 + ready a:1#1
2.0 first a:0#1 in=1 train=0.5 sync=0.3
"""
STARTED = {"boot": 1.0, "world_formation": 0.2, "sync": 0.3}


def after(script: str, m: Membership | None = None, **policy: object) -> tuple[Membership, list[t.Effect]]:
    return drive("\n".join(filter(str.strip, script.splitlines())), m, **{**TWO, **policy})


def times(m: Membership, now: float) -> dict[str, float]:
    """Return the parts that have any time, rounded."""
    found = figures_of(m, now).times
    parts: dict[str, float] = {"goodput": found.goodput} | dict(found.badput().items())
    return {part: round(seconds, 6) for part, seconds in parts.items() if seconds > 1e-9}


def notes(effects: Sequence[t.Effect], event: str) -> list[t.Note]:
    return [effect for effect in effects if isinstance(effect, t.Note) and effect.event == event]


TWO_HOSTS = """
0.0 hosts a:2 b:2
0.1 agent-joined a + agent-joined b
1.0 ready a:0#1 + ready a:1#1 + ready b:0#1 + ready b:1#1
"""
HSDP = TWO_HOSTS + "1.1 attached a:0#1 in=1 digests=7,8,7,8\n1.2 first a:0#1 in=1\n"
DISTINCT = HSDP.replace("7,8,7,8", "7,8,9,3")
FOUR = {"np": 4, "min_np": 1, "max_np": 4, "replicas": 0}


THREE_HOSTS = """
0.0 hosts a:1 b:1 c:1
0.1 agent-joined a + agent-joined b + agent-joined c
1.0 ready a:0#1 + ready b:0#1 + ready c:0#1
"""
ATTACHED = THREE_HOSTS + "1.1 attached a:0#1 in=1 digests=7,8,{}\n"
ALL_KEPT = "kept a a:0 {0} + kept b b:0 {0} + kept c c:0 {0} + kept b a:0 {0} + kept c b:0 {0} + kept a c:0 {0}"
NEWER = " + ".join(f"heartbeat {host}:0#1 in=1 ticks=5 commit=1.5 previous=1.4" for host in "abc")
THREE = {"np": 3, "min_np": 1, "max_np": 3}


def attach(last_digest: int = 9, **changes: object) -> tuple[Membership, list[t.Effect]]:
    m, _ = drive(THREE_HOSTS, **{**THREE, **changes})
    return drive(ATTACHED.format(last_digest), m)


# A link between two of three hosts is cut, and the world is formed without one of them.
CUT_LINK = (
    THREE_HOSTS
    + """1.2 first a:0#1 in=1
8.0 heartbeat b:0#1 in=1 ticks=9 commit=1.9 still=2.5
8.1 probed a order=1 + probed c order=1
12.0 probed b order=1 cut=c
12.1 ready a:0#1 in=1 commit=1.9 ticks=9 + ready b:0#1 in=1 commit=1.9 ticks=9 + ready c:0#1 in=1 commit=1.9 ticks=9
12.3 first a:0#1 in=2
"""
)


# All workers die, and the job resumes from an older commit. Then one worker dies, and the other one finishes.
WHOLE_JOB = """
0.0 hosts a:2
0.1 agent-joined a
1.0 ready a:0#1 + ready a:1#1
1.1 first a:0#1 in=1
4.0 heartbeat a:0#1 in=1 ticks=10 commit=1.10 + heartbeat a:1#1 in=1 ticks=11 commit=1.10
5.0 exit a:0#1 signal=9 + exit a:1#1 signal=9
7.0 ready a:0#2 commit=1.7 + ready a:1#2 commit=1.7
7.5 first a:0#2 in=2
9.0 exit a:1#2 signal=9
9.1 ready a:0#2 in=2 commit=2.3 ticks=5
9.4 first a:0#2 in=3
20.0 gate a:0#2 in=3
20.1 exit a:0#2 code=0
"""
