"""The sentinel in a process of its own: while Python is blocked, at its exit, in its children, and on Leave."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.net import messages
from elasticstate.net.link import MAX_DATAGRAM_BYTES
from tests.kit.pages import page_at

GENERATION = 3
ME = WorkerId("h", 0, 1)
SOON_S = 40.0  # for a busy machine; anything that must not happen takes 60 s
M = TypeVar("M")

BEGIN = f"""
import gc
gc.disable()  # imports make no garbage
import ctypes, os, signal, socket, sys, threading, time
from elasticstate import _native
from elasticstate.core.types import MemberOptions, Placement, WorkerId
from elasticstate.net import messages
from elasticstate.worker.sentinel import Sentinel
gc.enable()

class Context:
    sockets = _native.GlooSockets()
    severs_in_python = False

def say(text):
    os.write(1, text.encode() + b"\\n")

def enter():
    place = Placement(WorkerId("h", 0, 1), 0, 0, 1, 0, 0, 1)
    options = MemberOptions(60.0, 60.0, False, False)
    world = messages.World({GENERATION}, (place,), 1, 0, (), "127.0.0.1:" + sys.argv[3], options=options)
    sentinel.enter(world, Context)
    sentinel.begin_training()

page = _native.ControlPage(os.open(sys.argv[1], os.O_RDWR))
sentinel = Sentinel(int(sys.argv[2]), WorkerId("h", 0, 1), page)
sentinel.start()
store = socket.create_connection(("127.0.0.1", int(sys.argv[3])))
Context.sockets.watch_store("127.0.0.1", int(sys.argv[3]))
holding_the_gil = ctypes.PyDLL(None)
without_the_gil = ctypes.CDLL(None)
"""


class Process:
    """Worker process that runs BEGIN and then ``program``. The test plays its agent and its store."""

    def __init__(self, directory: Path, program: str, start: str) -> None:
        program = BEGIN.replace("sentinel.start()", start) + program
        page = directory / "control"
        page.write_bytes(bytes(4096))
        self.page = page_at(page)
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.agent.settimeout(SOON_S)
        with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(30)
            port = listener.getsockname()[1]
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    program,
                    str(page),
                    str(theirs.fileno()),
                    str(port),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": ""},  # output that is not flushed at the exit would be lost
                pass_fds=[theirs.fileno()],
                bufsize=0,
            )
            self.store, _ = listener.accept()
        self.store.settimeout(SOON_S)
        self.hear(messages.Hello)

    def tell(self, message: messages.ToWorkerBody) -> None:
        self.agent.send(messages.encode_to_worker(message))

    def hear(self, kind: type[M]) -> M:
        """Receive the next message, and check that it is of this kind."""
        message = messages.decode_from_worker(self.agent.recv(MAX_DATAGRAM_BYTES))
        assert isinstance(message, kind)
        return message

    def hears_nothing(self) -> bool:
        return not select.select([self.agent], [], [], 0)[0]

    def says_nothing(self) -> bool:
        return not select.select([self.process.stdout], [], [], 0)[0]

    def line(self) -> str:
        """Return the next line of the worker's output."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SOON_S)[0], "no output"
        return self.process.stdout.readline().decode().strip()

    def wait_for_beats(self, count: int) -> None:
        last = self.page.stamp()[0] + count
        deadline = time.monotonic() + SOON_S
        while self.page.stamp()[0] < last:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.01)

    def ended(self) -> tuple[int, str, str]:
        """Wait for the end of the worker. Return its exit status, stdout and stderr."""
        out, error = self.process.communicate(timeout=SOON_S)
        return self.process.returncode, out.decode(), error.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.agent.close()
        self.store.close()


class Start(Protocol):
    """Function that starts a worker. ``start``: code that starts its sentinel."""

    def __call__(self, program: str, start: str = "sentinel.start()") -> Process: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Process] = []

    def begin(program: str, start: str = "sentinel.start()") -> Process:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Process(directory, program, start))
        return made[-1]

    yield begin
    for process in made:
        process.close()


STANDING_STILL = {
    "another thread holds the GIL": """
threading.Thread(target=lambda: (say("standing"), holding_the_gil.usleep(60_000_000)), daemon=True).start()
""",
    "the main thread holds the GIL": "say('standing')\nwhile True: holding_the_gil.usleep(60_000_000)",
    "the main thread is in C": "say('standing')\nwhile True: without_the_gil.usleep(60_000_000)",
    "an endless loop": "say('standing')",
}


@pytest.mark.parametrize("program", STANDING_STILL.values(), ids=STANDING_STILL.keys())
def test_python_may_stand_still(start: Start, program: str) -> None:
    worker = start(f"enter()\n{program}\nwhile True: pass")
    assert worker.line() == "standing"
    worker.tell(messages.Hold(GENERATION))
    assert worker.hear(messages.HoldAnswer) == messages.HoldAnswer(GENERATION, 0, False)
    worker.wait_for_beats(3)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.hear(messages.WorkerPreemptionNotice) == messages.WorkerPreemptionNotice(signal.SIGTERM)
    worker.tell(messages.End(GENERATION, None, "test"))
    assert worker.store.recv(1) == b""  # the connection was cut
    worker.wait_for_beats(3)
    assert worker.process.poll() is None


HOLD_THE_GIL = """
times = []
other = threading.Timer(0.1, lambda: times.append(time.monotonic()))
other.start()
begun = time.monotonic()
holding_the_gil.usleep(500_000)
other.join()
say(str(not begun < times[0] < begun + 0.5))
"""


def test_the_gil_is_really_held_by_these_calls(start: Start) -> None:
    assert start(HOLD_THE_GIL).line() == "True"


@pytest.mark.parametrize(
    "program",
    [
        "print('kept', end=''); say('there'); time.sleep(60)",
        "print('kept', end=''); say('there'); without_the_gil.pause()",
        "enter(); print('kept', end=''); say('there'); time.sleep(60)",
        "enter(); print('kept', end=''); say('there'); sentinel.wait_in_gate()",
        "print('kept', end=''); say('there'); sentinel.ready('h:1')",
    ],
    ids=["boot", "boot in C", "train", "gate", "regroup"],
)
def test_told_to_leave_it_exits_with_0_and_its_output_is_whole(start: Start, program: str) -> None:
    worker = start(program)
    assert worker.line() == "there"
    if "sentinel." in program:
        worker.agent.recv(MAX_DATAGRAM_BYTES)  # Gate or Ready: the worker waits now
    worker.tell(messages.Leave(ME))
    status, out, error = worker.ended()
    assert (status, out, error) == (0, "kept", "")


def test_other_signals_may_be_notices(start: Start) -> None:
    program = "enter(); say('there')\nwhile True: without_the_gil.pause()"
    worker = start(program, "sentinel.start([signal.SIGUSR1, signal.SIGXCPU])")
    assert worker.line() == "there"
    for number in (signal.SIGXCPU, signal.SIGUSR1):
        worker.process.send_signal(number)
        assert worker.hear(messages.WorkerPreemptionNotice) == messages.WorkerPreemptionNotice(number)
    worker.tell(messages.Leave(ME))
    assert worker.ended() == (0, "", "")


def test_a_signal_that_is_no_notice_keeps_its_effect(start: Start) -> None:
    worker = start("enter(); say('there'); without_the_gil.pause()", "sentinel.start([signal.SIGUSR1])")
    assert worker.line() == "there"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended()[0] == -signal.SIGTERM


OWN = "signal.signal(signal.SIGUSR1, lambda *_: say('mine')); "


def test_a_handler_of_the_program_has_precedence(start: Start) -> None:
    begin = f"{OWN} sentinel.start([signal.SIGUSR1, signal.SIGTERM])"
    worker = start("enter(); say('there')\nwhile True: time.sleep(1)", begin)
    assert worker.line() == "there"
    worker.process.send_signal(signal.SIGUSR1)
    assert worker.line() == "mine"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.hear(messages.WorkerPreemptionNotice) == messages.WorkerPreemptionNotice(
        signal.SIGTERM
    )  # no other notice came before
    worker.tell(messages.Leave(ME))
    assert worker.ended() == (0, "", "")


HANDLES = "signal.signal(signal.SIGTERM, lambda *_: say('stops')); "


@pytest.mark.parametrize(
    "program",
    [f"{HANDLES} sentinel.start(); enter()", f"sentinel.start(); {HANDLES} enter()"],
    ids=["before", "after the start"],
)
def test_a_script_that_handles_sigterm_is_stopped_by_it_and_keeps_its_world(start: Start, program: str) -> None:
    worker = start("say('there')\nwhile True: time.sleep(1)", program)
    assert worker.line() == "there"
    worker.tell(messages.Terminate(GENERATION))
    assert worker.line() == "stops"
    worker.wait_for_beats(3)
    assert worker.hears_nothing(), "it is no preemption notice"
    assert worker.says_nothing(), "the handler of a script is called once"
    worker.store.setblocking(False)
    with pytest.raises(BlockingIOError):
        worker.store.recv(1)  # the connections of the generation are not cut


def test_a_handler_that_a_script_installs_while_it_trains_counts_from_the_next_tick_on(start: Start) -> None:
    worker = start(f"enter(); {HANDLES} sentinel.tick(); say('there')\nwhile True: time.sleep(1)")
    assert worker.line() == "there"
    worker.hear(messages.First)
    worker.tell(messages.Terminate(GENERATION))
    assert worker.line() == "stops"
    worker.process.send_signal(signal.SIGTERM)
    assert worker.line() == "stops"
    assert worker.hears_nothing(), "it is no preemption notice any more"


def test_any_other_script_leaves_at_once(start: Start) -> None:
    worker = start("enter(); say('there')\nwhile True: without_the_gil.pause()")
    assert worker.line() == "there"
    worker.tell(messages.Terminate(GENERATION))
    assert worker.ended() == (0, "", "")


@pytest.mark.parametrize("place", ["pass", "enter()"], ids=["boot", "train"])
@pytest.mark.parametrize("message", [messages.Leave(ME), messages.Terminate(GENERATION)], ids=["leave", "terminate"])
def test_it_leaves_from_a_call_that_one_signal_does_not_end(
    start: Start, place: str, message: messages.ToWorkerBody
) -> None:
    """Each call looks like this if the signal comes between Python's last look for signals and the system call."""
    two_pauses = "without_the_gil.qsort(ctypes.create_string_buffer(3), 3, 1, without_the_gil.pause)"
    worker = start(f"{place}; print('kept', end=''); say('there'); {two_pauses}; time.sleep(60)")
    assert worker.line() == "there"
    worker.tell(message)
    assert worker.ended() == (0, "kept", "")


def test_a_regroup_is_not_interrupted_by_leave(start: Start) -> None:
    goes_on = "lambda: (say('there'), time.sleep(0.8), print('kept', end=''))"
    worker = start(f"sentinel.ready('h:1', meanwhile={goes_on})")
    assert worker.line() == "there"
    worker.hear(messages.Ready)
    worker.tell(messages.Leave(ME))
    assert worker.ended() == (0, "kept", "")


def test_told_to_leave_in_a_boot_that_holds_the_gil(start: Start) -> None:
    worker = start("say('there'); holding_the_gil.usleep(60_000_000)")
    assert worker.line() == "there"
    worker.tell(messages.Leave(ME))
    assert worker.ended()[0] == 0


def test_behind_the_gate_a_leave_is_a_plain_sigterm(start: Start) -> None:
    worker = start("sentinel.finish(); say('there'); time.sleep(60)")
    assert worker.line() == "there"
    worker.tell(messages.Leave(ME))
    assert worker.ended()[0] == -signal.SIGTERM


def test_behind_the_gate_a_preemption_signal_waits_for_the_end_of_the_script(start: Start) -> None:
    """Also while the interpreter ends: its exit functions send the last signal."""
    program = """
import atexit
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), say("at exit")))
sentinel.finish()
os.kill(os.getpid(), signal.SIGTERM)
say("goes on")
"""
    worker = start(program)
    status, out, error = worker.ended()
    assert (status, out, error) == (0, "goes on\nat exit\n", "")


def test_a_worker_does_not_outlive_its_agent(start: Start) -> None:
    worker = start("enter(); say('there'); holding_the_gil.usleep(60_000_000)")
    assert worker.line() == "there"
    worker.agent.close()
    status, _, error = worker.ended()
    assert status == 1
    assert error == "elasticstate: lost the connection to the agent of this worker, so the worker exits\n"


def test_behind_the_gate_it_does(start: Start, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waits = f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    worker = start(
        f"sentinel.finish(); say('there')\n{waits}\nsentinel.send(messages.WorkerPreemptionNotice(15)); say('end')"
    )
    assert worker.line() == "there"
    worker.agent.close()
    worker.wait_for_beats(1)
    seen.touch()
    assert worker.ended() == (0, "end\n", "")


SLOW_END = """
class Slow:
    def __del__(self, sleep=time.sleep): sleep(0.5)
slow = Slow()
enter()
threading.Thread(target=sentinel.wait_in_gate, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("del sentinel; enter = None", 0),
        ("sys.exit(3)", 3),
        ("sys.keep = sentinel", 0),
        ("class Loop: pass\nloop = Loop(); loop.me = loop; loop.sentinel = sentinel; del sentinel", 0),
        ("enter(); sentinel.report_failure('sweeping at the end')", 0),
        ("enter(); threading.Thread(target=sentinel.wait_in_gate, daemon=True).start(); time.sleep(0.1)", 0),
        (SLOW_END, 0),
    ],
    ids=[
        "end",
        "deleted",
        "sys.exit",
        "kept by sys",
        "in a cycle",
        "sweeping",
        "another thread waits",
        "and the end is slow",
    ],
)
def test_the_interpreter_ends_as_without_it(start: Start, program: str, status: int) -> None:
    assert start(program).ended() == (status, "", "")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


FORK = """
enter()
pid = os.fork()
if pid == 0:
    try:
        sentinel.tick()
    except RuntimeError as error:
        say(str(error))
    try:
        sentinel.send(messages.WorkerPreemptionNotice(15))
    except RuntimeError:
        say("silent")
    page.heartbeat()
    page.set_place(2)
    say(f"{signal.getsignal(signal.SIGTERM)!r}")
    time.sleep(60)
else:
    _, status = os.waitpid(pid, 0)
    say(f"child ended by {os.WTERMSIG(status)}")
    sentinel.tick()
    say("ticked")
    time.sleep(60)
"""


@pytest.mark.parametrize("thread", [False, True], ids=["main_thread", "another_thread"])
def test_a_forked_child_has_no_part_in_the_job(start: Start, thread: bool) -> None:
    program = FORK.replace("\n", "\n    ")
    worker = start(f"def act():\n    {program}\nthreading.Thread(target=act).start()" if thread else FORK)
    assert "forked" in worker.line()
    assert worker.line() == "silent"
    assert "SIG_DFL" in worker.line()
    assert worker.page.stamp()[2:] == (messages.Place.TRAIN, GENERATION, 0)
    (child,) = children(worker.process.pid)
    os.kill(child, signal.SIGTERM)
    assert worker.line() == f"child ended by {signal.SIGTERM:d}"
    assert worker.line() == "ticked"
    assert worker.hear(messages.First).generation == GENERATION  # no notice came before
    worker.tell(messages.Hold(GENERATION))
    assert worker.hear(messages.HoldAnswer).ticks == 1
    worker.wait_for_beats(2)


def test_a_forked_child_that_ends_by_itself_runs_down_without_harm(start: Start) -> None:
    quiet = "import warnings\nwarnings.simplefilter('ignore')\n"  # Python 3.12 warns of a fork beside threads
    fork = "enter()\nif os.fork() == 0: sys.exit(5)\n_, status = os.wait()\nsay(str(os.WEXITSTATUS(status)))"
    worker = start(quiet + fork)
    assert worker.line() == "5"
    assert worker.ended() == (0, "", "")


COLLECTIVE = """
import datetime, torch, torch.distributed as dist
from elasticstate.worker.contexts import Rendezvous
from elasticstate.worker.contexts.gloo import GlooContext
port, rank = int(os.environ["PORT"]), int(os.environ["RANK"])
LONG = datetime.timedelta(seconds=120)
context = Context = GlooContext()
tcp = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
enter()
context.create(Rendezvous(dist.PrefixStore("g", tcp), "g", str(rank), rank, 2, LONG, LONG, lambda: None))
say("made")
if rank == 1:
    time.sleep(60)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    say(f"cut, broken: {context.broken()}")
os._exit(0)
"""


def test_notice_and_cut_of_a_worker_that_is_blocked_in_a_collective(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = []
    for rank in (0, 1):
        monkeypatch.setenv("PORT", str(store.port))
        monkeypatch.setenv("RANK", str(rank))
        workers.append(start(COLLECTIVE))
    blocked, _ = workers
    assert blocked.line() == "made"
    time.sleep(0.2)  # time to enter the collective; the test also holds if it has not
    blocked.process.send_signal(signal.SIGTERM)
    assert blocked.hear(messages.WorkerPreemptionNotice) == messages.WorkerPreemptionNotice(signal.SIGTERM)
    blocked.tell(messages.End(GENERATION, None, "test"))
    assert blocked.line() == "cut, broken: True"
    assert blocked.ended()[0] == 0
