"""Every wait of the package has a limit, or a reason why it ends, which is listed here.

The sources are searched for calls that may wait: of threads, sockets, pipes, processes, locks, event loops, stores and
devices. A call with an argument that limits it, or within ``asyncio.timeout``, is not listed, nor are

- collectives of torch and the creation of its groups: the group's time-out is their limit (``--collective-timeout``,
  ``--regroup-timeout`` while a world forms), and the sentinel cuts them when the generation ends;
- calls of a store: they have the store's time-out, and the sentinel cuts its connection;
- ``await f(...)`` for a coroutine of the package: its own waits are listed;
- sockets where the code expects BlockingIOError;
- locks that are held without a wait: a test checks that.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.sources import PACKAGE, ROOT, SOURCES, tree_of

# FILE FUNCTION CALL, by the reason why it ends. A line with * stands for at least one.
ENDS: dict[str, str] = {
    "the limit of a collective, or the end of its generation, which the sentinel cuts": """
        horovod/*.py * *wait
        horovod/optimizer.py _Distributed._reduce self._reducer.synchronize
        mpi/worker/group.py MpiGroup.recv_anysource self.recv
        mpi/worker/group.py Operation.synchronize self.wait
        mpi/worker/group.py Progress.stop self._thread.join
        state/session.py Channel.* self._group.*.wait
        worker/contexts/nccl.py NcclContext._be_through_together.meet cpu.barrier(options).wait
        worker/fixed.py FixedLoop.finish self._gate.barrier().wait
        worker/probe.py _exchange group.allreduce([total]).wait
    """,
    "the core's answer, by its own limits (test_policy_time_limits.py); a worker without an agent ends": """
        horovod/world.py * extension.join
        worker/fixed.py SoloLoop.run self.join
        worker/run.py join _make_loop().join
        worker/sentinel.py Sentinel.is_own_error self._native.wait_verdict
        worker/sentinel.py Sentinel.ready self._native.wait_order
        worker/sentinel.py Sentinel.ready self._native.wait_world
        worker/sentinel.py Sentinel.request self._native.wait_other
        worker/sentinel.py Sentinel.wait_in_gate self._native.wait_gate
    """,
    "this worker leaves the generation": """
        worker/sentinel.py Sentinel._cut self._native.wait_end
        worker/sentinel.py Sentinel._report self._native.wait_report
    """,
    "the agent of this host answers; its end closes the socket, and it kills who does not respond": """
        net/link.py AgentLink.next socket.recv_fds
        net/link.py AgentLink.send self._socket.send
        net/link.py ReceivedRequest.begin self._answer.recv
        net/link.py StorageLink.__init__ self._link.connect
        net/link.py StorageLink._receive socket.recv_fds
        net/link.py WorkerLink.connect self._socket.connect
        net/link.py WorkerLink.send self._socket.send
        net/link.py _receive await asyncio.get_running_loop().sock_recv
        net/link.py report_use_of_run link.connect
        worker/loop.py WorkerLoop.__init__ link.connect
        worker/template.py _forks_to_worker os.waitpid
        worker/template.py _reason_against_forks os.waitpid
        worker/user_metrics.py _connect link.connect
    """,
    "work that the device had before: collectives in it are cut, other kernels are the script's (--hang-timeout)": """
        state/async_commit.py Copy._checksum_copied_bytes mark.wait
        state/async_commit.py Copy._enqueue copy_stream.mark().wait
        state/async_commit.py Copy.release self._done.wait
        state/async_commit.py Copy.wait self._done.wait
        state/async_commit.py CopyStream.copy_back stream.synchronize
        state/async_commit.py Mark.wait self._event.synchronize
        state/snapshot.py Snapshot.settle copy.wait
    """,
    "whoever waits for this thread does so for a limited time": """
        worker/contexts/__init__.py answers.probe torch.cuda.synchronize
        worker/contexts/nccl.py NcclContext._be_through_together.meet torch.cuda.synchronize
    """,
    "torch closes the connections of groups; a timer ends a process that is not done with NCCL's": """
        compat/process_groups.py destroy_groups dist.destroy_process_group
        compat/process_groups.py destroy_groups dist.destroy_process_group
        horovod/world.py remove_process_set dist.destroy_process_group
        worker/fixed.py SoloLoop.end dist.destroy_process_group
    """,
    "bytes are copied between memory and files; a file system that hangs is reported after BLOCKED_S": """
        agent/durable_uploads.py DurableUploads._stage await asyncio.shield
        agent/durable_uploads.py stage with ThreadPoolExecutor
        agent/host_storage.py StorageAllocator._allocate await loop.run_in_executor
        agent/host_storage.py StorageAllocator.reserve await asyncio.gather
        horovod/timeline.py TraceFile.close self._thread.join
        state/committer.py Committer._growing growth.join
        state/committer.py Committer.settle self._peers.wait
        state/peer.py PeerReader.load self.wait
        state/peer.py PeerReader.read_ahead self.wait
        state/peer.py PeerReader.wait self._ahead.thread.join
        threads.py in_thread await answer
    """,
    "the other tasks or agents hold it for a moment": """
        agent/host_job.py _locked fcntl.flock
        agent/host_storage.py StorageAllocator.make async with self._locks.setdefault((slot, index), asyncio.Lock())
        check/hosts.py host_lines.line async with limit
        commits.py make_agent_directory fcntl.flock
        driver/metrics.py MetricsServer._answer await self._one_at_a_time.acquire
        net/control.py DriverConnection._greet async with self._greeting
        driver/record.py Keeper._end async with self._writing
        driver/record.py Keeper.keep async with self._writing
        driver/record.py Keeper.look async with self._writing
        mpi/agent_part.py MpiAgent._tunnel_port async with self._opening
    """,
    "the tasks were cancelled, or their own waits have limits": """
        agent/agent.py Service.run await asyncio.wait
        agent/agent.py Service.run await asyncio.wait
        agent/durable_uploads.py DurableUploads.close await asyncio.wait
        agent/host_job.py HostJob.lock_host await asyncio.wait
        agent/host_job.py HostJob.lock_host await asyncio.wait
        agent/preemption.py PreemptionWatch.close await asyncio.wait
        agent/template_process.py Template.close await asyncio.gather
        agent/workers.py Workers._watch await asyncio.wait
        agent/workers.py Workers.all_started await asyncio.wait
        agent/workers.py Workers.stop_all await asyncio.wait
        net/control.py DriverConnection.establish await asyncio.gather
        net/control.py DriverConnection.establish await asyncio.wait
        check/hosts.py exchange_lines await asyncio.wait
        check/hosts.py host_lines await asyncio.wait
        check/hosts.py host_lines await asyncio.wait
        check/run.py _Check._print await answer
        check/run.py _Check.run await asyncio.wait
        check/run.py _Check.run await findings
        check/run.py _Check.run await torch
        check/run.py _until_a_signal await asyncio.wait
        driver/dashboard/server.py Dashboard.served await asyncio.wait
        driver/driver.py Driver._main_loop await asyncio.gather
        driver/driver.py Driver._run_in async with self._dashboard_served()
        driver/driver.py Driver.run async with await self._metrics_served()
        driver/election.py Elected.tell_the_last_driver await asyncio.gather
        driver/durable.py DurableCopies._answered_or await asyncio.wait
        driver/metrics.py MetricsServer._answer await asyncio.shield
        driver/output.py LiveLine.shown await asyncio.gather
        driver/report.py LaunchResults.fetched await asyncio.gather
        mpi/broker.py _connect await asyncio.gather
        net/control.py ControlServer.stop await asyncio.gather
        net/control.py ControlServer.stop await asyncio.gather
        net/control.py ControlServer.stop await asyncio.wait
        net/control.py DriverStream._dial await asyncio.gather
        net/reach.py Probes._probe await asyncio.gather
        net/reach.py _opens await asyncio.get_running_loop().sock_connect
        net/reach.py is_reached await asyncio.gather
        net/control.py ask_status await getting
        net/web.py WebPort.close await asyncio.wait
        net/web.py WebPort.close await asyncio.wait
        processes.py _start asyncio.wait
        processes.py ask asyncio.wait
    """,
    "serves until its task is cancelled or its work is over; nobody waits for it": """
        agent/agent.py Service.run await asyncio.wait
        agent/agent.py find_driver await asyncio.wait
        driver/dashboard/server.py Dashboard._write_regularly await self._has_news.wait
        driver/driver.py Driver._follow async for discovery.changes()
        driver/driver.py EventQueue.wait await self._is_due.wait
        horovod/timeline.py TraceFile._write_all self._events.get
        horovod/timeline.py TraceFile._write_all self._events.get
        mpi/broker.py Relay._serve await asyncio.open_connection
        mpi/broker.py Relay._serve await reader.readline
        mpi/broker.py _connect await asyncio.wait
        mpi/broker.py _copy await reader.read
        mpi/broker.py _copy await writer.drain
        mpi/worker/group.py Progress._run self._changed.wait_for
        net/trust.py Strangers.accept await loop.sock_accept
        replicas/pusher.py HostReplicas._run self._changed.wait_for
        threads.py _serve calls.get
        writing.py Writer._next self._changed.wait_for
    """,
    "the connection between driver and agent ends, by --heartbeat-timeout at the latest": """
        launchers/__init__.py DialledIn.ended await self._over.wait
        net/control.py DriverStream.get await self._changed.wait
        net/control.py DriverStream.receive await self.get
        net/control.py Stream.closed await asyncio.wait
        net/control.py Stream.first_received await asyncio.wait
    """,
    "a visitor of the dashboard: who is slow or silent is dismissed, and aiohttp closes within its limit": """
        driver/dashboard/server.py DashboardServer._drain await request.read
        driver/dashboard/server.py DashboardServer._guarded await handler
        driver/dashboard/server.py DashboardServer._streamed async for messages
        driver/dashboard/server.py DashboardServer._streamed async with aclosing(messages)
        driver/dashboard/server.py DashboardServer._streamed await response.prepare
        driver/dashboard/server.py DashboardServer.close await self._runner.cleanup
        driver/dashboard/server.py DashboardServer.start await self._runner.setup
        driver/dashboard/server.py Viewers.messages await queue.get
    """,
    "the process that it waits for has ended, or was killed": """
        agent/durable_uploads.py DurableUploads._end process.wait
        agent/template_process.py ForkedChild.wait os.waitpid
        agent/template_process.py _Process.close self._process.wait
        agent/template_process.py _Process.end self._process.wait
        agent/template_process.py _Process.ended await self._answering
        agent/workers.py PlainStores._serve child.wait
        agent/workers.py WorkerProcess._end_session self._process.wait
        driver/agents.py Agents._all_ended await gone
        driver/screen.py Screen._end self._process.wait
        launchers/__init__.py early_agent process.communicate
        launchers/command.py CommandAgent.ended self._process.wait
        mpi/driver_part.py Mpirun.stop self._process.wait
    """,
    "the process for which it is there ends: a job, a driver, an agent, a worker, or the writer of a pipe": """
        agent/__main__.py _first_line os.read
        agent/template_process.py _Process._read await reader.readline
        agent/worker_output.py Pump._read await reader.read
        agent/workers.py PlainStores._read await reader.readline
        agent/standby.py Standby._run await reader.readline
        agent/standby.py Standby._run process.wait
        agent/standby.py _start process.wait
        cli/run.py _launched.end_with_the_caller os.read
        cli/run.py _stand_by sys.stdin.readline
        driver/election.py stand_by await asyncio.wait
        driver/painter.py _Terminal._read_lines os.read
        driver/painter.py _write select.select
        launching.py _wait process.wait
        mpi/broker.py _serve with ThreadPoolExecutor
        mpi/holder.py main select.select
        net/link.py StoreListener.first_connection await arrived
        processes.py _read await stream.read
        processes.py ended await over
        ray.py _Host.run agent.wait
        worker/plain_store.py main signal.pause
    """,
    "the thread was told to end, or is cut from what it waits for": """
        replicas/client.py ReplicaClient.read_into answer.result
        replicas/client.py ReplicaClient.read_into with ThreadPoolExecutor
        replicas/pusher.py HostReplicas.close self._pusher.join
        replicas/pusher.py HostReplicas.close self._threads.shutdown
        replicas/replica_server.py ReplicaServer.close thread.join
        worker/call_monitor.py stop _thread.join
        worker/contexts/nccl.py _ending_within timer.join
        worker/loop.py Regrouper.leave self._retiring.join
        worker/sentinel.py Sentinel.leave self._has_reported.wait
        worker/sentinel.py Sentinel.leave self._has_reported.wait
        worker/sentinel.py Sentinel.leave self._helpers.pop().join
    """,
    "the socket does not block, or has a time-out of its own": """
        agent/agent.py Service._grow_buffer self._socket.send
        agent/agent.py Service._publish self._socket.send
        agent/agent.py Service._send self._socket.send
        agent/workers.py Workers.stop self._socket.send
        net/control.py ControlServer._authenticate await loop.connect_accepted_socket
        net/link.py PendingFork.go self._socket.send
        net/link.py TemplateLink.request socket.send_fds
        net/link.py WorkerConnection.give socket.send_fds
        net/link.py answering.answer await writer.drain
        net/link.py ask_agent connection.connect
        net/link.py ask_agent connection.recv
        net/names.py _source_address towards.connect
        net/trust.py LocalPeers._ask self._kernel.recv
        net/web.py WebPort._connect await asyncio.get_running_loop().connect_accepted_socket
        replicas/client.py * connection.send
        replicas/pusher.py HostReplicas._push connection.send
        replicas/replica_server.py ReplicaServer._accept connection.send
        replicas/replica_server.py ReplicaServer._admit connection.sendall
        replicas/wire.py dial connection.connect
        replicas/wire.py dial connection.sendall
    """,
    "what it asks for is there": """
        agent/durable_uploads.py _discard staging.result
        driver/painter.py Painter._text capture.get
        driver/record.py _take_driver_lock os.read
        driver/screen.py Screen.close os.read
        driver/screen.py Screen.close os.read
        driver/screen.py Screen.hide os.read
        driver/screen.py Screen.hide os.read
    """,
}

_COROUTINES = {
    node.name for source in SOURCES for node in ast.walk(tree_of(source)) if isinstance(node, ast.AsyncFunctionDef)
}
_SUBPROCESS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
_OF_SOCKETS = {"accept", "connect", "recv", "recv_fds", "recv_into", "recvfrom", "recvmsg"}
_OF_SOCKETS |= {"send_fds", "sendall", "sendmsg"}
_SOCKET = re.compile(r"(socket|sock|connection|listener|conn)$")
_COLLECTIVES = {
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "init_process_group",
}
_COLLECTIVES |= {"all_gather", "gather", "new_group", "recv", "reduce", "scatter", "send"}
_OF_STORES = {"add", "check", "compare_set", "get", "multi_get", "set", "wait"}
_LOCK = re.compile(r"\bthreading\.(Lock|RLock|Condition|Semaphore)\b")
_TASKS = {"asyncio.ensure_future", "asyncio.create_task"}
_AT_ONCE = {"connect_read_pipe", "start_server", "start_unix_server"}  # nothing to wait for


def _has_limit(call: ast.Call, place: int | None) -> bool:
    """Return True if a call has a time-out: an argument of that name, or the one at this place."""
    for keyword in call.keywords:
        if keyword.arg in ("timeout", "timeout_s"):
            return ast.unparse(keyword.value) != "None"
    return place is not None and len(call.args) > place and ast.unparse(call.args[place]) != "None"


def _may_wait(call: ast.Call, is_async: bool) -> bool | None:
    """Return True if a call may wait without a limit, False if its wait has one, None if it does not wait."""
    text, callee = ast.unparse(call), ast.unparse(call.func)
    owner, _, name = callee.rpartition(".")
    match name:
        case "sleep" if owner in ("time", "asyncio"):
            return False
        case "wait" if owner == "asyncio":
            return not _has_limit(call, None)
        case "gather" | "as_completed" if owner == "asyncio":
            return True
        case "wait" if owner.endswith("store"):
            return False
        case "wait" if owner:
            return not _has_limit(call, 0)
        case "wait_for" if owner:
            return not _has_limit(call, 1)
        case "join" if owner and not call.args:
            return not _has_limit(call, None)
        case "get" if owner and not call.args:
            return not _has_limit(call, None)
        case "acquire" if owner:
            return not _has_limit(call, 1) and "False" not in text
        case "result" if owner and not is_async:
            return not _has_limit(call, 0)
        case "communicate":
            return not _has_limit(call, 1)
        case "waitpid" | "waitid" | "wait3" | "wait4":
            return "WNOHANG" not in text
        case "flock" | "lockf" if owner == "fcntl":
            return "LOCK_NB" not in text and "LOCK_UN" not in text
        case "select" if owner == "select":
            return not _has_limit(call, 3)
        case "read" if owner == "os":
            return True
        case "pause" | "sigwait" if owner == "signal":
            return True
        case "destroy_process_group" | "synchronize" if owner:
            return True
        case "shutdown" if re.search("thread|pool|executor", owner):
            return "wait=False" not in text
        case "put" if re.search("queue$", owner):
            return not _has_limit(call, 2)
        case "read" | "readline" if re.search(r"std(in|out|err)(\.buffer)?$|pipe$", owner):
            return True
        case "send" if _SOCKET.search(owner):
            return "MSG_DONTWAIT" not in text
        case "urlopen" | "create_connection" | "getaddrinfo" | "gethostbyname":
            return not _has_limit(call, 1)
    if callee in _SUBPROCESS:
        return not _has_limit(call, None)
    if name in _OF_SOCKETS and owner:
        return "MSG_DONTWAIT" not in text
    if name.startswith("wait_") and owner.endswith("_native"):
        return True
    if (owner.endswith("dist") and name in _COLLECTIVES) or (owner.endswith("store") and name in _OF_STORES):
        return False
    return None


class _Search(ast.NodeVisitor):
    """The waits of a source that have no limit: function and call. ``under_locks``: those in a block with a lock."""

    def __init__(self, locks: set[str]) -> None:
        self._lock_names = locks
        self.found: list[tuple[str, str]] = []
        self.under_locks: list[tuple[str, str]] = []
        self.limited = 0
        self._names: list[str] = []
        self._is_async = False
        self._limits = 0  # blocks around this node that limit it
        self._locks: list[str] = []
        self._awaited: set[ast.expr] = set()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        saved = self._is_async, self._limits, self._locks
        self._is_async, self._limits, self._locks = isinstance(node, ast.AsyncFunctionDef), 0, []
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        self._is_async, self._limits, self._locks = saved

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        saved = self._is_async, self._limits, self._locks
        self._is_async, self._limits, self._locks = False, 0, []
        self.generic_visit(node)
        self._is_async, self._limits, self._locks = saved

    def _note(self, call: str) -> None:
        if not self._limits:
            self.found.append((".".join(self._names), call))
        if self._locks and not any(call.startswith(lock) for lock in self._locks):  # a condition gives its lock back
            self.under_locks.append((".".join(self._names), call))

    def _block(self, node: ast.With | ast.AsyncWith) -> None:
        saved = self._limits, self._locks
        for item in node.items:
            value, text = item.context_expr, ast.unparse(item.context_expr)
            self.visit(value)
            if re.match(r"asyncio\.timeout(_at)?\((?!None)", text):
                self._limits += 1
            elif re.search(r"Executor\(|Popen\(", text):
                self._note(f"with {text.partition('(')[0]}")
            elif isinstance(node, ast.AsyncWith) and not self._is_own(value):
                self._note(f"async with {text}")
            elif text.rpartition(".")[2] in self._lock_names:
                self._locks = [*self._locks, text]
        for statement in node.body:
            self.visit(statement)
        self._limits, self._locks = saved

    visit_With = visit_AsyncWith = _block

    def visit_Try(self, node: ast.Try) -> None:
        expects = any(handler.type and "BlockingIOError" in ast.unparse(handler.type) for handler in node.handlers)
        self._limits += expects
        for statement in node.body:
            self.visit(statement)
        self._limits -= expects
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._note(f"async for {ast.unparse(node.iter)}")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self._note(f"async for {ast.unparse(node.iter)}")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        value = node.value
        self._awaited.add(value)
        if not isinstance(value, ast.Call):
            self._note(f"await {ast.unparse(value)}")
        elif not self._is_own(value) and _may_wait(value, True) is None:
            self._note(f"await {ast.unparse(value.func)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        callee = ast.unparse(node.func)
        waits = _may_wait(node, self._is_async)
        if waits:
            self._note(("await " if node in self._awaited else "") + callee)
        self.limited += waits is False
        # The limit of asyncio.wait_for is that of its argument. A task waits where it is awaited.
        is_limit = callee in _TASKS or (callee == "asyncio.wait_for" and not waits)
        self._limits += is_limit
        self.generic_visit(node)
        self._limits -= is_limit

    @staticmethod
    def _is_own(value: ast.expr) -> bool:
        if not isinstance(value, ast.Call):
            return False
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in _COROUTINES or name in _AT_ONCE


def _searched(tree: ast.Module) -> _Search:
    search = _Search(_locks_of(tree))
    search.visit(tree)
    return search


@functools.cache
def _found() -> dict[Path, _Search]:
    return {source.relative_to(PACKAGE): _searched(tree_of(source)) for source in SOURCES}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("event.wait()", "event.wait"),
        ("event.wait(None)", "event.wait"),
        ("event.wait(timeout=None)", "event.wait"),
        ("event.wait(2.0)", ""),
        ("thread.join()", "thread.join"),
        ("queue.get()", "queue.get"),
        ("found.get('key')", ""),
        ("subprocess.run(command, check=True)", "subprocess.run"),
        ("subprocess.run(command, timeout=5)", ""),
        ("fcntl.flock(fd, fcntl.LOCK_EX)", "fcntl.flock"),
        ("os.waitpid(pid, os.WNOHANG)", ""),
        ("connection.recv(10)", "connection.recv"),
        ("try:\n    connection.recv(10)\nexcept BlockingIOError:\n    pass", ""),
        ("self._native.wait_moon(3)", "self._native.wait_moon"),
        ("with ThreadPoolExecutor(3) as threads:\n    pass", "with ThreadPoolExecutor"),
        ("async def f():\n    await asyncio.wait(tasks)", "await asyncio.wait"),
        ("async def f():\n    await asyncio.wait(tasks, timeout=3)", ""),
        ("async def f():\n    await asyncio.wait_for(reader.read(1), 3)", ""),
        ("async def f():\n    async with asyncio.timeout(3):\n        await reader.read(1)", ""),
        ("async def f():\n    await reader.read(1)", "await reader.read"),
        ("async def f():\n    await self.moon", "await self.moon"),
        ("async def f():\n    async for line in moon:\n        pass", "async for moon"),
    ],
)
def test_the_search_knows_what_waits(code: str, found: str) -> None:
    assert [call for _, call in _searched(ast.parse(code)).found] == ([found] if found else [])


def test_the_search_knows_what_waits_under_a_lock() -> None:
    code = "lock = threading.Lock()\nchanged = threading.Condition()\nwith lock:\n    thread.join()\n"
    code += "with changed:\n    changed.wait()\nwith other:\n    thread.join()"
    assert _searched(ast.parse(code)).under_locks == [("", "thread.join")]


def _locks_of(tree: ast.Module) -> set[str]:
    """Return the names of the locks of threads that a source makes."""
    return {
        ast.unparse(target).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _LOCK.search(ast.unparse(node.value))
        for targets in node.targets
        for target in (targets.elts if isinstance(targets, ast.Tuple) else [targets])
    }


def test_every_wait_without_a_limit_is_listed_with_the_reason_why_it_ends() -> None:
    found = Counter(
        f"{source} {function} {call}" for source, search in _found().items() for function, call in search.found
    )
    assert sum(search.limited for search in _found().values()) > 100, "the search itself"
    listed = Counter(line.strip() for text in ENDS.values() for line in text.strip().splitlines())
    for pattern in [line for line in listed if "*" in line]:
        meant = {line for line in found if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), line)}
        assert meant, f"{pattern} stands for nothing"
        for line in (*meant, pattern):
            del found[line], listed[line]
    new, gone = found - listed, listed - found
    assert not new, "waits without a limit that are not listed:\n" + "\n".join(new.elements())
    assert not gone, "listed, but not there:\n" + "\n".join(gone.elements())


# Waits of the native code: FILE, call, limit or the reason why it ends
NATIVE = """
    bindings.cpp    std::this_thread::sleep_for(    as long as it is told
    gloo_sockets.cpp  connect(    the socket does not block
    gloo_sockets.cpp  poll(       the time that is left of the limit
    sentinel.cpp    poll(         100 ms
    sentinel.cpp    ppoll(        the time of the next heartbeat
    sentinel.cpp    recvmsg(      MSG_DONTWAIT
    sentinel.cpp    futex_wait(   PAUSE_INTERVAL; the conditions of wait_until are those of Sentinel.wait_* above
    sentinel.cpp    join(         the thread of this process, which was told to end
"""
_NATIVE_WAITS = re.compile(
    r"\b(?:std::this_thread::)?(?:sleep_for|sleep_until|usleep|nanosleep|poll|ppoll|epoll_p?wait|select|pselect|recv|"
    r"recvfrom|recvmsg|accept4?|connect|waitpid|waitid|flock|join|futex_wait|pthread_\w*wait|wait|wait_for)\("
)


def test_every_wait_of_the_native_code_is_listed_with_its_limit() -> None:
    found = {
        (path.name, call.removeprefix("measured_"))
        for path in sorted((ROOT / "native").glob("*.[ch]pp"))
        for line in path.read_text().splitlines()
        if not re.match(r"\s*(//|bool futex_wait|\.def)", line)
        for call in _NATIVE_WAITS.findall(line)
    }
    listed = {tuple(line.split()[:2]) for line in NATIVE.strip().splitlines()}
    assert found == listed


def test_nobody_waits_while_he_holds_a_lock() -> None:
    """So whoever waits for a lock of threads does so for a moment. A wait on a condition gives its own lock back."""
    held = [
        f"{source} {function} {call}" for source, search in _found().items() for function, call in search.under_locks
    ]
    assert not held, "waits under a lock:\n" + "\n".join(held)
