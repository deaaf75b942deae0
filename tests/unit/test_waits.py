"""Every wait is an option: numbers of seconds in the code that are not in ``config/`` have a reason here.

What can end, kill or fail something is an option, or follows from one. What is left is how often one looks, how long a
moment is, and what stands in the contract.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import elasticstate
from elasticstate.config import Options
from elasticstate.core.policy import Policy

PACKAGE = Path(elasticstate.__file__).parent
NATIVE = PACKAGE.parent / "native"
OPTIONS = {"config.options", "core.policy"}  # the one has them, the other repeats the defaults of some

ALLOWED = {
    # how often one looks; nothing ends by it
    "agent.claim: _LOOK_INTERVAL_S": "between two looks; --heartbeat-timeout decides",
    "agent.leftovers: _LEAST_INTERVAL_S": "between two looks for leftovers",
    "agent.agent: LOOK_INTERVAL_S": "between two looks at the stamps; --heartbeat-timeout and --hang-timeout decide",
    "agent.pulse: _STAMPS_INTERVAL_S": "between two messages with them, at most",
    "agent.contact: _FIRST_PAUSE_S": "between two attempts to dial; --orphan-timeout decides",
    "agent.contact: _LONGEST_PAUSE_S": "the same",
    "commits: time.sleep(0.01)": "between two looks at a lock",
    "driver.agents: _LONGEST_INTERVAL_S": "between two looks at who is silent; --heartbeat-timeout decides",
    "driver.driver: _LONGEST_DELAY_S": "collects what is not urgent",
    "driver.launcher: interval_s": "at least one second, the least that ssh takes; --heartbeat-timeout decides",
    "driver.record: time.sleep(0.01)": "between two looks at a lock",
    "net.control: _BREATH_S": "before the next connection is accepted, when there is no descriptor left",
    "net.control: _NEXT_ADDRESS_S": "RFC 8305: before the next address is tried, too; --connect-timeout decides",
    "worker.contexts.gloo_groups: time.sleep(0.001)": "between two looks",
    "mpi.broker: _LOOK_INTERVAL_S": "between two looks whether the job is over",
    "driver.identities: _LOOK_INTERVAL_S": "between two looks; --start-timeout decides",
    "worker.contexts.nccl: _LOOK_INTERVAL_S": "between two looks",
    "worker.contexts.mpi.identity: _LOOK_INTERVAL_S": "between two looks; --regroup-timeout decides",
    "worker.contexts.mpi.context: _LOOK_INTERVAL_S": "between two looks; --regroup-timeout decides",
    "worker.contexts.mpi.world: _LOOK_INTERVAL_S": "between two looks; the end of the generation decides",
    "worker.contexts.mpi.operation: _SHORTEST_PAUSE_S": "between two tests of what is under way",
    "worker.contexts.mpi.operation: _LONGEST_PAUSE_S": "the same",
    "worker.sentinel: _SWEEP_INTERVAL_S": "between two cuts",
    "worker.regroup: _SLICE": "of the wait for the store; --regroup-timeout decides",
    # what is over already is given a moment to be tidy
    "agent.agent: _STACKS_TIMEOUT_S": "for the stacks of a worker whose kill is decided",
    "agent.worker_process: _DRAIN_TIMEOUT_S": "for the output of a process that has ended",
    "driver.agents: _LAST_MOMENT_S": "for a process to end whose sockets are closed, so that its status is known",
    "net.stream: _LAST_MOMENT_S": "for the other end of a connection that is being closed",
    "driver.mpirun: _END_TIMEOUT_S": "for processes that have been killed; the job is over",
    "driver.mpirun: _LOOK_INTERVAL_S": "between two looks at them",
    "worker.contexts.mpi.world: _LATEST_MESSAGE_S": "before something is freed; nothing waits",
    "worker.contexts.mpi.world: _EARLY_TIMEOUT_S": "for what would make the next pause shorter",
    "worker.contexts.gloo_groups: _CUT_AFTER_S": "for operations of a generation that has been left",
    "worker.contexts.nccl: _TOGETHER_TIMEOUT_S": "for all members to be through with a generation that is left; then "
    "it is left all the same",
    "worker.contexts.mpi.operation: _ABANDON_AFTER_S": "for operations of a generation that has ended",
    "worker.contexts.mpi.context: _STUCK_AFTER_S": "for MPI to come back from a generation that has ended; then the "
    "worker is replaced, and a longer wait would not help",
    "worker.contexts.gloo_groups: _QUIET_TIMEOUT_S": "for operations that were cut; then it goes on all the same",
    # what decides by itself
    "driver.record: _LOCK_TIMEOUT_S": "a living driver keeps this lock for good, who only looks for microseconds",
    # the contract: DESIGN.md, sections 3 and 4; they delay a start, and give way
    "core.cooldown: MAX_BACKOFF_S": "restarted after 0, 1, 2, 4 ... 60 s",
    "core.cooldown: SAME_DEATH_S": "deaths within 1 s on one host count once",
    "core.ending: QUIET_S": "not before the new world's first tick or 1 s",
}
ALLOWED_NATIVE = {
    "gloo_sockets.cpp: REJECT_FOR{50}": "a moment for a connection to one's own listener; tried again at the next",
    "gloo_waits.cpp: LOOK_INTERVAL{20}": "between two looks",
    "gloo_waits.cpp: ASLEEP_FOR{60}": "then a sleeper of an ended generation is woken",
    "gloo_waits.cpp: HOPELESS_AFTER{5}": "250 attempts to wake it: the worker cannot leave an ended generation, and is "
    "replaced; it ends no job, and a longer wait would not help",
    "sentinel.cpp: LEAVE_BOOT_WITHIN{1}": "a worker that was told to leave before it had begun, exits",
    "sentinel.cpp: poll(&log, 1, 100)": "for a line in the log; given up if the reader is stuck",
    "sentinel.hpp: BEAT_INTERVAL{250}": "between two stamps",
    "sentinel.hpp: SWEEP_INTERVAL{3}": "between two sweeps",
    "sentinel.hpp: PAUSE_INTERVAL{100}": "between two looks at a flag",
}

_NAME = re.compile(r"_(s|ms|ns|seconds)$|timeout|interval|delay|pause|patience|grace|slice|deadline", re.IGNORECASE)
_WAITS = {
    "sleep",
    "wait",
    "wait_for",
    "timeout",
    "call_later",
    "settimeout",
    "set_timeout",
    "timedelta",
    "poll",
    "select",
}
_NATIVE_CONSTANT = re.compile(r"chrono::(?:hours|minutes|(?:milli|micro|nano)?seconds)\s+(\w+\{[\d']+\})")
_NATIVE_CALL = re.compile(r"\b(?:p?poll|usleep|sleep_for|sleep|nanosleep)\([^()]*\b[1-9]\d*\)")


def waits(source: str) -> Iterator[str]:
    """Names that are given a number of seconds in ``source``, and calls that wait for one."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value) | ast.AnnAssign(target=ast.Name(name), value=value):
                if value is not None and _is_a_wait(name) and _has_a_number(value):
                    yield name
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=args, keywords=keywords):
                given = [*args, *(k.value for k in keywords)] if name in _WAITS else []
                given += [k.value for k in keywords if k.arg and _is_a_wait(k.arg)]
                if any(map(_has_a_number, given)) and not _is_value_of_a_name(tree, node):
                    yield ast.unparse(node)
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                yield from _defaults(arguments)


def _is_a_wait(name: str) -> bool:
    return _NAME.search(name) is not None and "_per_" not in name.lower()


def _defaults(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :] + arguments.kwonlyargs
    for argument, value in zip(with_default, [*arguments.defaults, *arguments.kw_defaults], strict=True):
        if value is not None and _is_a_wait(argument.arg) and _has_a_number(value):
            yield argument.arg


def _has_a_number(value: ast.expr) -> bool:
    """Other than 0, alone or added to something; a number that scales something else is none."""
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float() as number):
            return number != 0
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _has_a_number(left) or _has_a_number(right)
        case ast.BinOp(left=left, right=right):
            return _has_a_number(left) and _has_a_number(right)
        case ast.Call(func=ast.Name("timedelta" | "min" | "max"), args=args, keywords=keywords):
            return any(_has_a_number(part) for part in [*args, *(k.value for k in keywords)])
    return False


def _is_value_of_a_name(tree: ast.AST, call: ast.Call) -> bool:
    """``_SLICE = timedelta(seconds=1)`` is told of once."""
    return any(isinstance(node, ast.Assign) and node.value is call for node in ast.walk(tree))


def test_every_number_of_seconds_is_an_option_or_has_a_reason() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if name not in OPTIONS:
            found |= {f"{name}: {wait}" for wait in waits(path.read_text(encoding="utf-8"))}
    assert sorted(found - set(ALLOWED)) == [], "make it an option in config/, or let it follow from one"
    assert sorted(set(ALLOWED) - found) == [], "not there any more"


def test_every_number_of_seconds_in_the_native_code_has_a_reason() -> None:
    found = set()
    for path in sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.hpp")]):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        calls = [call[0] for call in _NATIVE_CALL.finditer(text)]
        found |= {f"{path.name}: {wait}" for wait in [*_NATIVE_CONSTANT.findall(text), *calls]}
    assert sorted(found - set(ALLOWED_NATIVE)) == [], "make it follow from an option"
    assert sorted(set(ALLOWED_NATIVE) - found) == [], "not there any more"


def test_the_policy_repeats_the_defaults_of_the_options() -> None:
    options = {f.name: f.default for f in fields(Options)}
    options["cooldown_min_s"], options["cooldown_max_s"] = options["cooldown_range_s"]
    for field in fields(Policy):
        if field.name.endswith("_s") and field.name in options:
            assert field.default == options[field.name], field.name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_EXIT_TIMEOUT_S = 5.0", ["_EXIT_TIMEOUT_S"]),
        ("_SLICE = timedelta(seconds=0.25)", ["_SLICE"]),
        ("interval: float = 2", ["interval"]),
        ("async def f():\n    await asyncio.sleep(0.5)", ["asyncio.sleep(0.5)"]),
        ("async def f():\n    await asyncio.wait_for(x, 30)", ["asyncio.wait_for(x, 30)"]),
        ("p.wait(timeout=3)", ["p.wait(timeout=3)"]),
        ("connect(host, connect_timeout_s=300)", ["connect(host, connect_timeout_s=300)"]),
        ("loop.call_later(2, stop)", ["loop.call_later(2, stop)"]),
        ("def f(patience_s: float = 5.0, *, pause=1): ...", ["patience_s", "pause"]),
        ("deadline = time.monotonic() + 5 * 60", ["deadline"]),
        ("deadline = max(now, then + 300)", ["deadline"]),
        ("deadline = now + options.start_timeout_s", []),
        ("sleep(0)\nsleep(interval_s)\nwait(timeout=None)", []),
        ("timeout_s = 2 * options.stop_timeout_s", []),
        ("_PAGE_BYTES = 4096", []),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, found: list[str]) -> None:
    assert list(waits(source)) == found
