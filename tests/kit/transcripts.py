"""Golden transcripts of the core: ``python -m tests.simulation.transcripts --update`` writes the answers again.

A transcript (``tests/simulation/transcripts/*.txt``) begins with comments that name the property it shows, and a line
``policy``. Then follows ``> t=SECONDS EVENT`` (``EVENT + EVENT``: they arrive together), and below it the core's
answer: one line for each effect, and ``= PHASE: reason``, with the next deadline. Lines with ``>`` are written by
hand, answers are generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticstate.core import types as t
from elasticstate.core.step import new_membership, next_deadline, step
from tests.kit.policy import policy_of
from tests.kit.simulation.verified import Verified

TRANSCRIPTS = Path(__file__).parents[1] / "simulation" / "transcripts"


def replay(text: str) -> str:
    """Return the transcript with the answers of the present core, whose events hold."""
    lines: list[str] = []
    m = new_membership(policy_of(np=1, min_np=1))
    written = Verified(m.policy)
    for line in text.splitlines():
        if line.startswith("policy "):
            m = new_membership(replace(m.policy, **{key: _value(value) for key, value in _pairs(line.split()[1:])}))
            written = Verified(m.policy)
            lines.append(line)
        elif line.startswith("> "):
            at, _, events = line[2:].partition(" ")
            parts = tuple(parse_event(event.split()) for event in events.split(" + "))
            event = parts[0] if len(parts) == 1 else t.Several(parts)
            now = float(at.removeprefix("t="))
            m, effects, reason = step(m, event, now)
            for effect in effects:
                written.see(now, effect, m)
            deadline = next_deadline(m)
            until = f" (until {deadline:g})" if deadline is not None else ""
            lines += ["", line, *(f"  {describe(effect)}" for effect in effects)]
            lines.append(f"  = {m.phase_name}: {reason}{until}")
        elif line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, value = word.partition("=")
        yield key, value


def _value(text: str) -> Any:
    if text.isalpha():
        return None if text == "off" else text
    return float(text) if "." in text else int(text)


def _worker(name: str) -> t.WorkerId:
    slot_id, _, incarnation = name.partition("#")
    host, _, slot = slot_id.rpartition(":")
    return t.WorkerId(host, int(slot), int(incarnation))


def _commit(text: str | None) -> t.CommitId | None:
    return t.CommitId(*map(int, text.split("."))) if text else None


def _pace(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``5-15:100:700``: each of the ticks 5 to 15 takes 100 ms of the worker's own time, after 700 ms before."""
    if not text:
        return ()
    ticks, each_ms, before_ms = text.split(":")
    begin, end = map(int, ticks.split("-"))
    own_ms = (int(before_ms) + int(each_ms) * number for number in range(1, end - begin + 2))
    return tuple((tick, ms * 1000) for tick, ms in zip(range(begin, end + 1), own_ms, strict=True))


def _commits(text: str) -> tuple[t.CommitId, ...]:
    return tuple(t.CommitId(*map(int, word.split("."))) for word in text.split(",") if word)


def _host(word: str) -> t.HostSlots:
    """Parse ``a:2`` or ``a:2/rack``."""
    name, _, slots = word.partition("/")[0].partition(":")
    return t.HostSlots(name, int(slots), word.partition("/")[2])


def _slot(name: str) -> t.SlotId:
    host, _, slot = name.rpartition(":")
    return t.SlotId(host, int(slot))


def _joined(host: str, words: list[str]) -> t.AgentJoined:
    """Parse the words after the host. ``0=1.6,1.5``: slot 0 retains these commits. ``a:1#1=2``: this worker lives, and
    world 2 is the last one it received. ``b:0=1.5``: the agent keeps a copy of this commit of slot b:0."""
    pairs = list(_pairs(words))
    commits = [(int(slot), _commits(text)) for slot, text in pairs if ":" not in slot]
    workers = [(_worker(name), int(generation)) for name, generation in pairs if "#" in name]
    kept = [(_slot(name), _commits(text)[0]) for name, text in pairs if ":" in name and "#" not in name]
    found = tuple((slot, held[0]) for slot, held in commits)
    previous = tuple((slot, held[1]) for slot, held in commits if len(held) > 1)
    return t.AgentJoined(host, found, tuple(workers), (), previous, tuple(kept))


def parse_event(words: list[str]) -> t.Event:
    """Parse an event such as ``ready a:0#1 in=1 commit=1.6``; ``in`` is the generation."""
    kind, *rest = words
    if kind == "time":
        return t.TimePassed()
    if kind == "hosts":
        return t.HostsDiscovered(tuple(map(_host, rest)))
    if kind.startswith("agent-"):
        events: dict[str, Callable[[], t.Event]] = {
            "agent-joined": lambda: _joined(rest[0], rest[1:]),
            "agent-lost": lambda: t.AgentLost(rest[0], " ".join(rest[1:])),
            "agent-unreachable": lambda: t.AgentLost(rest[0], " ".join(rest[1:]), may_live=True),
            "agent-draining": lambda: t.HostDraining(rest[0], " ".join(rest[1:])),
        }
        return events[kind]()
    if kind in ("healthy", "sick"):
        return t.HealthChecked(rest[0], " ".join(rest[1:]))
    if kind == "stop":
        return t.StopRequested(" ".join(rest))
    if kind == "store-joined":
        return t.PlainStoreJoined(int(rest[0]))
    if kind in ("kept", "dropped"):
        copy = (rest[0], _slot(rest[1]), _commits(rest[2])[0])
        return t.CopyKept(*copy) if kind == "kept" else t.CopyDropped(*copy, " ".join(rest[3:]))
    if kind == "saved":
        return t.DurableCopySaved(_commits(rest[0])[0])
    if kind == "probed":
        given = dict(_pairs(rest[1:]))
        cut = tuple(filter(None, given.get("cut", "").split(",")))
        return t.LinksProbed(rest[0], int(given["order"]), cut)
    if kind == "damaged":
        return t.CommitDamaged(_slot(rest[0]), _commits(rest[1])[0])
    worker, given = _worker(rest[0]), dict(_pairs(rest[1:]))
    generation, ticks, commit = int(given.get("in", "0")), int(given.get("ticks", "0")), _commit(given.get("commit"))
    paused_s, commit_s, train_s, sync_s = (float(given.get(key, "0")) for key in ("paused", "commits", "train", "sync"))
    trained_s = float(given.get("trained", "0"))
    match kind:
        case "ready":
            sealed, store = _commit(given.get("sealed")), f"{worker.host}:5000"
            begin = (generation, commit, _commit(given.get("previous")), store, ticks, paused_s)
            times = {"commit_s": commit_s, "trained_s": trained_s}
            return t.FromWorker(worker, t.Ready(*begin, sealed=sealed, has_shards="shards" in given, **times))
        case "exit":
            code, signal = (int(given[key]) if key in given else None for key in ("code", "signal"))
            pid = 0 if "unstarted" in given else 1
            end = (given.get("error", ""), int(given.get("at", "0")), _commits(given.get("held", "")))
            return t.WorkerExited(worker, pid, code, signal, *end)
        case "run":
            return t.WorkerUsesRun(worker)
        case "unresponsive":
            return t.WorkerUnresponsive(worker, "no stamp for 10 s")
        case "draining":
            return t.FromWorker(worker, t.WorkerPreemptionNotice(15))
        case "answer":
            return t.FromWorker(worker, t.HoldAnswer(generation, ticks, "gate" in given, int(given.get("to", "1"))))
        case "failure" | "suspect":
            return t.FromWorker(worker, t.GenerationFailure(generation, kind == "failure", given.get("error", "")))
        case "gate":
            return t.FromWorker(worker, t.Gate(generation, commit_s))
        case "heartbeat":
            place, pace = t.Place[given.get("place", "train").upper()], _pace(given.get("pace", ""))
            previous = _commit(given.get("previous"))
            still_s = float(given.get("still", "0"))
            stamp = t.Stamp(place, generation, ticks, commit, commit_s, pace, previous, still_s, trained_s)
            return t.FromWorker(worker, stamp)
        case "where":
            entered = [word.split(":") for word in given.get("entered", "").split(",") if word]
            collectives = tuple(t.Collective("default_pg", int(number), text) for number, text in entered)
            line = given.get("line", "")
            return t.FromWorker(worker, t.CollectivesReport(generation, collectives, f"stack of {line}", line))
        case "attached":
            return t.FromWorker(worker, t.Attached(generation, tuple(map(int, given["digests"].split(",")))))
        case "sealed":
            assert commit is not None
            return t.FromWorker(worker, t.CommitSealed(commit))
        case "digests":
            digests = tuple(tuple(map(int, each.split(":"))) for each in given["digests"].split(","))
            return t.FromWorker(worker, t.CommitDigests(generation, digests))
        case "digest_answer":
            question = t.DigestQuestion(*map(int, given["question"].split(":")))
            parts = tuple(map(int, given["parts"].split(",")))
            names = tuple(given["names"].split(",")) if "names" in given else ()
            return t.FromWorker(worker, t.DigestAnswer(generation, question, parts, len(names), names))
        case "first":
            return t.FromWorker(worker, t.First(generation, train_s, sync_s))
        case "call":
            ranks = tuple(map(int, given["ranks"].split(","))) if "ranks" in given else ()
            waiting_s = float(given["waits"]) if "waits" in given else None
            number, text = int(given["number"]), given.get("text", "barrier()")
            report = t.CallReport(generation, int(given.get("set", "0")), ranks, number, text, waiting_s)
            return t.FromWorker(worker, report)
    raise ValueError(f"no such event: {kind}")


def describe(effect: t.Effect) -> str:
    """Return one readable line for an effect."""
    match effect:
        case t.World() as world:
            hosts: dict[str, list[str]] = {}
            for p in world.members:
                hosts.setdefault(p.worker.host, []).append(f"{p.rank}={p.worker}")
            lacking = (
                f"state from {world.root} to {list(world.lacking)}" if world.lacking else "all members hold the state"
            )
            start = lacking if world.line is None else f"line {world.line} from {_sources(world)}"
            start += f", from commit {world.start}" if world.start is not None else ""
            return f"PublishWorld {world.generation}: {' | '.join(' '.join(m) for m in hosts.values())}, {start}"
        case t.Replicate(commit, copies):
            return f"Replicate {commit}: {', '.join(f'{slot_id} on {host}' for slot_id, host in copies)}"
        case t.StopReplication():
            return "StopReplication"
        case t.ProbeLinks(number, peers, limit_s):
            probes = "; ".join(f"{host} to {', '.join(its) or 'none'}" for host, its in peers)
            return f"ProbeLinks {number}: {probes}, for {limit_s:g} s"
        case t.ForgetCopies(before, besides, host):
            parts = [f"before {before}", f"except {besides}" if besides else "", f"host {host}" if host else ""]
            return f"ForgetCopies {', '.join(filter(None, parts))}"
        case t.End(generation, at_tick, cause):
            return f"End {generation} {'now' if at_tick is None else f'at tick {at_tick}'}: {cause}"
        case t.Sever(worker, generation, cause):
            return f"Sever {worker} from {generation}: {cause}"
        case t.Note(event, fields):
            shown = " ".join(f"{key}={value!r}" for key, value in fields if value not in ((), [], None, ""))
            return f"note {event} {shown}"
        case t.EndJob(succeeded, cause, own_error):
            own = ", own error" if own_error else ""
            return f"EndJob succeeded: {succeeded}{own}" + (f"; {cause}" if cause is not None else "")
        case t.StopWorker(worker, reason, kill):
            return f"StopWorker {worker}{' (kill)' if kill else ''}: {reason}"
        case t.StopAgent(host, reason):
            return f"StopAgent {host}: {reason}"
        case t.StartAgent(host) | t.CheckHealth(host):
            return f"{type(effect).__name__} {host}"
        case t.StartWorker(worker) | t.Leave(worker) | t.ConfirmOwnError(worker, _):
            return f"{type(effect).__name__} {worker}"
        case t.Hold(generation) | t.Release(generation) | t.OpenGate(generation) | t.Terminate(generation):
            return f"{type(effect).__name__} {generation}"
        case t.CommitsCompared(generation, equal, compared):
            return f"CommitsCompared {generation}: equal up to tick {equal}, compared up to tick {compared}"
        case t.AskDigests(worker, generation, question):
            return f"AskDigests {worker} {generation}: {':'.join(map(str, question))}"
        case t.WatchCalls(generation, on):
            return f"WatchCalls {generation}: {'on' if on else 'off'}"


def _sources(world: t.World) -> str:
    copies = (source.copy for source in world.sources)
    return ", ".join(str(c.slot) if c.host == c.slot.host else f"{c.slot} on {c.host}" for c in copies)


def main() -> int:
    """Replay all transcripts; with ``--update`` write the answers."""
    changed = 0
    for path in sorted(TRANSCRIPTS.glob("*.txt")):
        before = path.read_text()
        after = replay(before)
        if after != before:
            changed += 1
            print(f"{'updated' if '--update' in sys.argv else 'differs'}: {path.name}")
            if "--update" in sys.argv:
                path.write_text(after)
    return 0 if "--update" in sys.argv else bool(changed)
