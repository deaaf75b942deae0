"""Every wait is an option. Each number of seconds outside ``config/`` needs a reason in this file.

What can end, kill or fail something is an option, or follows from one. What is left is how often one looks, how long a
moment is, and what stands in the contract.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticstate

PACKAGE = Path(elasticstate.__file__).parent
NATIVE = PACKAGE.parent / "native"
OPTIONS = {"config.options", "config.horovod_options"}

ALLOWED = {
    # intervals between two looks; nothing ends by them
    "core.policy: waiting_notice_s": "a wait that lasts longer is reported",
    "driver.live_line: _INTERVAL_S": "between two updates of the live line",
    "driver.live_line: _NO_TICKS_S": "no wait: after this time without ticks the shown rate falls",
    "screen.__main__: _STALE_MS": "after this time without an update the live line is removed",
    "screen.screen: _ANSWER_S": "for a terminal to be clean before Ctrl-Z stops the driver; it stops in any case",
    "status_cli: _INTERVAL_S": "default of status --watch",
    "agent.host_lock: _LOOK_INTERVAL_S": "between two attempts to lock; --heartbeat-timeout decides",
    "agent.orphans: _REAP_INTERVAL_S": "between two searches for orphans that have ended",
    "agent.template: _LOOK_INTERVAL_S": "between two looks at its CPU time; --heartbeat-timeout decides",
    "worker.template: time.sleep(0.0005)": "between two looks at the parent of a worker that has just forked",
    "agent.stale_files: _LEAST_INTERVAL_S": "between two searches for stale files",
    "agent.supervisor: LOOK_INTERVAL_S": "between two looks at the stamps; --heartbeat-timeout decides",
    "agent.deleted_files: _LOOK_INTERVAL_S": "between two checks of files that another process may delete",
    "driver.reattach: _LOOK_INTERVAL_S": "the same",
    "state.tick_record: _SLOW_S": "no wait: a record that takes less is not slow",
    "agent.liveness: _STAMPS_INTERVAL_S": "between two messages with heartbeats",
    "agent.driver_connection: _FIRST_PAUSE_S": "between two attempts to dial; --orphan-timeout decides",
    "agent.driver_connection: _LONGEST_PAUSE_S": "the same",
    "copies.library: _LOOK_INTERVAL_S": "between two signs of life to a peer that waits",
    "copies.incoming: _LOOK_INTERVAL_S": "the same",
    "copies.connection: _SIGN_INTERVAL_S": "the same",
    "copies.server: _NO_DESCRIPTOR_PAUSE_S": "when the process has no descriptors left",
    "driver.replication_sums: _INTERVAL_S": "between two events of replication",
    "driver.copy_totals: _WINDOW_S": "no wait: the bandwidth in the status is that of this time",
    "driver.copy_totals: _SAMPLE_S": "no wait: between two samples of the bytes sent",
    "copies.rate: _BURST_S": "no wait: the bytes of this time are sent at once",
    "copies.pusher: _LOOK_INTERVAL_S": "between two looks for the seal of a commit",
    "copies.pusher: _FIRST_PAUSE_S": "between two attempts to send a copy; the driver's next order ends them",
    "copies.pusher: _LONGEST_PAUSE_S": "the same",
    "copies.pusher: _UNREACHABLE_S": "of a target that another agent cannot reach: the driver orders a newer commit",
    "state.buffer: _LOOK_INTERVAL_S": "between two looks whether the agent still copies a buffer; it sets the limit",
    "copies.pusher: _PIN_NS": "for which workers wait with a commit, beside the time of copies in memory",
    "copies.pusher: _LONGEST_PIN_NS": "for which workers wait with a commit at most",
    "copies.library: _TRUST_S": "no wait: a copy that was not read for this time is verified again",
    "commits: time.sleep(0.01)": "between two looks at a lock",
    "driver.agent_silence: _LONGEST_INTERVAL_S": "between two searches for silent agents; --heartbeat-timeout decides",
    "driver.agents: _LOOK_INTERVAL_S": "between two looks at an agent that has a rival; --heartbeat-timeout decides",
    "driver.agents: _IN_FLIGHT_S": "for data that an agent sent before its rival dialled in",
    "loggers.wandb: _INTERVAL_S": "between two looks at the file",
    "kubernetes.pod_watch: _PAUSE_S": "between two requests to the API server",
    "kubernetes.pod_watch: _WATCH_S": "of one watch, after which the next one begins where it has ended",
    "driver.durable_copies: _LOOK_INTERVAL_S": "between two looks whether a durable copy is due",
    "driver.durable_copies: _FIRST_RETRY_S": "between two attempts to save a durable copy; training goes on",
    "driver.durable_copies: _LONGEST_RETRY_S": "the same",
    "driver.durable_copies: _LEAD_S": "for orders to arrive before a commit; the next attempt has more time",
    "driver.durable_copies: _LONGEST_LEAD_S": "the same",
    "driver.durable_copies: _LAST_RETRY_S": "between two attempts, of at most four, to save the last commit of a job",
    "driver.durable_plan: _RARELY_S": "no wait: workers with longer times between commits keep a commit long enough",
    "driver.durable_plan: _PACE_S": "no wait: of a measurement",
    "agent.staging: _LOOK_INTERVAL_S": "between two looks for the seal of a commit",
    "agent.staging: _COMING_S": "for a commit to come, which is expected within 10 s; then another attempt follows",
    "durable.reader: _LOOK_INTERVAL_S": "between two looks at the end of the generation; --durable-timeout decides",
    "durable.upload: _PROGRESS_INTERVAL_S": "between two reports of progress; --durable-timeout decides",
    "durable.command: _TIMEOUT_S": "the default of --durable-timeout; elasticrun export has no such option",
    "driver.event_queue: _LONGEST_DELAY_S": "collects changes that are not urgent",
    "discovery.slurm: _INTERVAL_S": "default of --discovery-interval inside an allocation of Slurm",
    "launchers.slurm: _LIMIT_S": "of a command of Slurm that cleans up; nothing depends on its success",
    "launchers.ssh: interval_s": "at least one second, the least that ssh takes; --heartbeat-timeout decides",
    "driver.dashboard.port: _WRITE_INTERVAL_S": "between two writes of the dashboard's history",
    "driver.dashboard.server: _END_S": "for the last event of each stream",
    "driver.dashboard.server: _TAIL_TIMEOUT_S": "for an agent's answer, which only a page awaits",
    "driver.dashboard.viewers: INTERVAL_S": "between two views",
    "driver.dashboard.viewers: QUIET_INTERVAL_S": "between two views without an event in between",
    "net.http_server: _POLL_S": "no wait: the end of the server wakes it up",
    "driver.output_troubles: _LOOK_INTERVAL_S": "between two looks at output that is not written",
    "driver.record: time.sleep(0.01)": "between two looks at a lock",
    "net.control: _NO_DESCRIPTOR_PAUSE_S": "before the next connection is accepted, when there is no descriptor left",
    "net.control: _NEXT_ADDRESS_S": "RFC 8305: before the next address is tried, too; --connect-timeout decides",
    "worker.contexts.gloo_groups: time.sleep(0.001)": "between two looks",
    "state.peer: _LOOK_INTERVAL_S": "between two looks at a seal; the end of the generation decides",
    "loop_watch: SLOW_S": "a longer callback is reported in tests; nothing ends by it",
    "writing: BLOCKED_S": "a write that lasts longer is reported; output waits no longer for it, and nothing else ends",
    "writing: _RETRY_INTERVAL_S": "between two attempts to write data",
    "mpi.broker: _LOOK_INTERVAL_S": "between two checks for the end of the job",
    "mpi.driver: _LOOK_INTERVAL_S": "between two looks; --start-timeout decides",
    "worker.contexts.nccl: _LOOK_INTERVAL_S": "between two looks",
    "mpi.worker.identity: _LOOK_INTERVAL_S": "between two looks; --regroup-timeout decides",
    "mpi.worker.context: _LOOK_INTERVAL_S": "between two looks; --regroup-timeout decides",
    "mpi.worker.world: _LOOK_INTERVAL_S": "between two looks; the end of the generation decides",
    "mpi.worker.operation: _SHORTEST_PAUSE_S": "between two tests of an operation that is under way",
    "mpi.worker.operation: _LONGEST_PAUSE_S": "the same",
    "worker.session: _LOOK_INTERVAL_S": "between two looks at the end of the generation, while shards are read",
    "worker.session: _SILENCE_S": "of a host that serves a copy: another copy may serve, or the generation fails",
    "worker.sentinel: _SWEEP_INTERVAL_S": "between two cuts",
    "worker.plain_store: _LOOK_INTERVAL_S": "between two looks for the first worker in the store",
    "worker.call_monitor: _LOOK_INTERVAL_S": "between two looks at the newest call",
    "worker.call_monitor: _LASTING_S": "a state that lasts longer is reported to the agent; --stall-check-time decides",
    "worker.fixed: _LOOK_INTERVAL_S": "between two looks at the connections",
    "worker.meeting: _LOOK_INTERVAL_S": "between two looks for the file of rank 0",
    "worker.meeting: _SLICE": "of the wait for the store",
    "worker.regroup: _SLICE": "of the wait for the store; --regroup-timeout decides",
    # a moment for something that has ended already to clean up
    "loggers.wandb: _FINISH_S": "for wandb's process to write the rest of its file; then an error names it",
    "kubernetes.pod_watch: _STOP_S": "for the thread of a watch to end; the process ends without it",
    "agent.durable_uploads: _LAST_MOMENT_S": "for a process to exit that has sent its last message",
    "agent.durable_uploads: _KILL_TIMEOUT_S": "for a process that was killed; later it counts as stuck, and no other "
    "upload starts until it has ended",
    "agent.supervisor: _STACKS_TIMEOUT_S": "for the stacks of a worker whose kill is decided",
    "agent.output: _MOMENT_S": "for a terminal or file to take the last output; it is written later all the same",
    "agent.template: _DRAIN_TIMEOUT_S": "for the output of a process that has ended",
    "worker.template: _LONGEST_ADOPTION_S": "for the end of a process that exits at once; else there is no agent left",
    "agent.worker_process: _DRAIN_TIMEOUT_S": "for the output of a process that has ended",
    "driver.agents: _LAST_MOMENT_S": "for a process to end whose sockets are closed, so that its status is known",
    "net.stream: _LAST_MOMENT_S": "for the other end of a connection that is being closed",
    "mpi.mpirun: _END_TIMEOUT_S": "for processes that have been killed; the job is over",
    "mpi.mpirun: _LOOK_INTERVAL_S": "between two looks at them",
    "mpi.worker.world: _LATEST_MESSAGE_S": "before something is freed; nothing waits",
    "mpi.worker.world: _EARLY_TIMEOUT_S": "for what would make the next pause shorter",
    "worker.contexts.gloo_groups: _CUT_AFTER_S": "for operations of a generation that has been left",
    "worker.contexts.nccl: _TOGETHER_TIMEOUT_S": "for all members to be through with a generation that is left; then "
    "it is left all the same",
    "mpi.worker.operation: _ABANDON_AFTER_S": "for operations of a generation that has ended",
    "mpi.worker.context: _STUCK_AFTER_S": "for MPI to come back from a generation that has ended; then the "
    "worker is replaced, and a longer wait would not help",
    "worker.contexts.gloo_groups: _QUIET_TIMEOUT_S": "for operations that were cut; then it goes on all the same",
    "core.stall_check: ANSWER_S": "for the agents' answers, before a stall is reported",
    "worker.fixed: _EVIDENCE_S": "for the connections of a dead process to close, after a failed collective",
    # worlds of other launchers, such as mpirun: elasticrun and its options are not there
    "worker.fixed: _COLLECTIVE_TIMEOUT": "the default of --collective-timeout",
    "worker.fixed: _NO_TIMEOUT": "the wait at the end of a script has no limit",
    "worker.meeting: TIMEOUT": "for all processes to come; then the error says who did not, and how to set the address",
    # limits that decide by themselves
    "driver.record: _LOCK_TIMEOUT_S": "a driver keeps this lock until it ends, other processes for microseconds",
    # the contract: DESIGN.md, sections 3 and 4; these delay a start, and give way
    "core.cooldown: MAX_BACKOFF_S": "restarted after 0, 1, 2, 4 ... 60 s",
    "core.cooldown: SAME_DEATH_S": "deaths within 1 s on one host count once",
    "core.replication: _FIRST_PAUSE_S": "after 0.5, 1, 2 ... 30 s",
    "core.replication: _LONGEST_PAUSE_S": "after 0.5, 1, 2 ... 30 s",
    "core.replication: _LEAD_S": "a moment for orders to arrive",
    "core.replication: _REFUSAL_S": "no wait: a host that refused a copy is chosen last for this time",
    "core.replication: _COMING_S": "then another commit is chosen; nothing waits for it",
    "core.replication: _FREQUENT_S": "commits further apart last until they are copied; nothing waits for it",
    "core.ending: QUIET_S": "not before the new world's first tick or 1 s",
}
ALLOWED_NATIVE = {
    "gloo_sockets.cpp: REJECT_FOR{50}": "a moment for a connection to one's own listener; tried again at the next",
    "gloo_waits.cpp: LOOK_INTERVAL{20}": "between two looks",
    "gloo_waits.cpp: ASLEEP_FOR{60}": "then a sleeper of an ended generation is woken",
    "gloo_waits.cpp: HOPELESS_AFTER{5}": "250 attempts to wake it: the worker cannot leave an ended generation, and is "
    "replaced; it ends no job, and a longer wait would not help",
    "pace.cpp: SHORTEST{90}": "no wait: points of shorter time are written less often",
    "pace.cpp: LONGEST{180}": "no wait: points of longer time are written more often",
    "sentinel.cpp: LEAVE_BOOT_WITHIN{1}": "a worker that gets a preemption notice before it has begun, exits",
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
    """Yield the names in ``source`` that get a number of seconds, and the calls that wait for one."""
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
    """Return True for a number other than 0, alone or in a sum. A number that scales a value does not count."""
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
    """Return True for the call in ``_SLICE = timedelta(seconds=1)``, which counts by its name already."""
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
