"""Workers that fork from the template process: a script cannot tell the difference; faults cost time, nothing else."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticstate.core.ids import WorkerId
from elasticstate.net import messages
from tests.kit.agent import Scene, play
from tests.kit.processes import command_of, has_ended
from tests.kit.sources import ROOT

CASES = Path(__file__).with_name("template_cases.py")
ENDS = ("text", "code", "error", "interrupt", "signal", "term", "exec", "library", "stdio", "object", "none")


def some(names: Iterable[str], *others: str) -> list[Any]:
    """Return parameters, of which the ``others`` belong to the long version of a test."""
    return [pytest.param(name, marks=pytest.mark.long if name in others else ()) for name in names]


LIBRARY = """
#include <unistd.h>
__attribute__((destructor)) static void say(void) { if (write(1, "library\\n", 8) < 0) _exit(9); }
"""


def template_of(scene: Scene) -> psutil.Process | None:
    """Return the template process of the agent. A worker that has just forked has its command line for a moment."""
    children = psutil.Process(scene.agent.pid).children()
    names = ("elasticstate template", "elasticstate/worker/template.py")  # the latter until it has begun
    found = [c for c in children if any(name in command_of(c) for name in names)]
    return min(found, key=psutil.Process.create_time, default=None)


async def started_template(scene: Scene) -> psutil.Process:
    """Wait for the template process. It may have no command line a moment later, within exec."""
    while (template := template_of(scene)) is None:
        await asyncio.sleep(0.005)
    return template


def is_forked(pid: int) -> bool:
    """Return True if the process has the environment of the template process, with padding: it was not started anew."""
    deadline = time.monotonic() + 60
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):  # for a moment within exec
        assert time.monotonic() < deadline, f"process {pid} has no environment"
    return environment.endswith(b"\0\0") or b"ELASTICSTATE_PADDING=" in environment


class Run:
    """Runs cases in the workers of one agent."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.incarnation = 0

    async def start(self, case: str) -> WorkerId:
        (self.scene.directory / "case").write_text(case)
        self.incarnation += 1
        worker = WorkerId("h", 0, self.incarnation)
        self.scene.send(messages.StartWorker(worker))
        return worker

    async def started(self, worker: WorkerId) -> int:
        """Return the process id of a worker that has started."""

        def found() -> list[int]:
            return [m.pid for m in self.scene.heard if isinstance(m, messages.Started) and m.worker == worker]

        await self.scene.until(lambda: bool(found()), f"the start of {worker}")
        return found()[0]

    async def ended(self, worker: WorkerId) -> messages.WorkerExited:
        def found() -> list[messages.WorkerExited]:
            return [m for m in self.scene.heard if isinstance(m, messages.WorkerExited) and m.worker == worker]

        await self.scene.until(lambda: bool(found()), f"the end of {worker}")
        return found()[0]

    async def case(self, case: str) -> tuple[messages.WorkerExited, str, str]:
        """Run a case to its end. Return its end, and what it printed on stdout and stderr."""
        for log in ("h-0.out", "h-0.err"):
            (self.scene.directory / "logs" / log).unlink(missing_ok=True)
        worker = await self.start(case)
        ended = await self.ended(worker)
        out, err = (
            (self.scene.directory / "logs" / log).read_text().split("\n", 1)[1] for log in ("h-0.out", "h-0.err")
        )
        return ended, out, err


async def begin(scene: Scene, *command: str, **options: Any) -> Run:
    await scene.start()
    await scene.until(lambda: scene.has_joined, "an agent")
    scene.beating = asyncio.ensure_future(scene.heartbeat())
    scene.send(scene.spec(*command, log_dir=str(scene.directory / "logs"), tee=0, **options))
    return Run(scene)


def all_ways(directory: Path, command: list[str], cases: Iterable[str]) -> None:
    """Run the cases in workers that fork, in new processes, and in Python processes that elasticstate has no part in.

    Assert that the results are equal.
    """
    found: dict[str, list[Any]] = {}
    for way in ("fork", "new process", "plain"):

        async def scenario(scene: Scene, way: str = way) -> None:
            words = ["env", *command] if way == "plain" else command
            run = await begin(scene, *words, preload=() if way == "fork" else None)
            for case in cases:
                ended, out, err = await run.case(case)
                out = out.replace(scene_name(scene), "")
                found.setdefault(way, []).append((case, ended.exit_code, ended.signal, ended.error, out, err))
            worker = await run.start("sleep")
            assert is_forked(await run.started(worker)) is (way == "fork")
            scene.send(messages.StopWorker(worker, "the test is over", kill=True))
            await run.ended(worker)
            assert not [m for m in scene.heard if isinstance(m, messages.AgentWarning)]

        play(directory, scenario)
        shutil.rmtree(directory / "job")
    for forked, new, plain in zip(*found.values(), strict=True):
        assert differences(forked, plain) == []
        assert differences(new, plain) == []


def differences(forked: Any, new: Any) -> list[object]:
    """Return what differs between two results; of what ``look`` prints, each entry."""
    if forked[0] != "look":
        return [] if forked == new else [forked, new]
    one, other = json.loads(forked[4]), json.loads(new[4])
    return [forked, new] * (forked[5] != new[5]) + [
        (key, one[key], other[key]) for key in one if one[key] != other[key]
    ]


def scene_name(scene: Scene) -> str:
    return f"{scene.directory}/job/s{scene._agents}"


FORMS = {
    "script": ["cases.py", "a b", "--flag"],
    "unbuffered": ["-u", "folder/cases.py"],
    "link": ["link.py"],
    "absolute": ["{}/folder/cases.py", ""],
    "module": ["-m", "folder.cases", "x"],
    "package": ["-m", "whole"],
}


@pytest.mark.parametrize("form", some(FORMS, "unbuffered", "absolute", "package"))
def test_a_script_sees_no_difference(tmp_path: Path, form: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "whole").mkdir()
    for name in ("cases.py", "folder/cases.py", "whole/__main__.py"):
        shutil.copy(CASES, tmp_path / name)
    (tmp_path / "link.py").symlink_to("folder/cases.py")
    command = [sys.executable, *(word.format(tmp_path) for word in FORMS[form])]
    all_ways(tmp_path, command, ["look"])


def test_python_found_on_the_path_keeps_the_name_that_the_command_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pkill -f '^python train.py'`` finds the workers of ``elasticrun python train.py``."""
    shutil.copy(CASES, tmp_path / "cases.py")
    folder, name = os.path.split(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    all_ways(tmp_path, [name, "cases.py"], ["look"])


def test_all_ends_are_those_of_a_new_process(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")
    (tmp_path / "exit.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "exit.so", tmp_path / "exit.c"], check=True)
    all_ways(tmp_path, [sys.executable, "cases.py"], [f"leave {how}" for how in ENDS])


def test_a_worker_of_torch_ends_without_the_exit_functions_of_its_libraries(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")

    async def scenario(scene: Scene) -> None:
        ended, out, err = await (await begin(scene, sys.executable, "cases.py")).case("libraries")
        assert (ended.exit_code, json.loads(out)) == (0, []), err

    play(tmp_path, scenario)


def test_a_syntax_error_is_shown_without_frames(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("print(1)\nif:\n")

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "bad.py")
        ended, out, err = await run.case("none")
        assert (ended.exit_code, out) == (1, "")
        assert err == f'  File "{tmp_path}/bad.py", line 2\n    if:\n      ^\nSyntaxError: invalid syntax\n'

    play(tmp_path, scenario)


def test_process_pools_and_loaders_work(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")
    all_ways(tmp_path, [sys.executable, "cases.py"], ["processes"])


def test_each_worker_has_seeds_of_its_own(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "cases.py")
        numbers = [json.loads((await run.case("random"))[1]) for _ in range(3)]
        *own, seed = zip(*numbers, strict=True)
        assert all(len(set(values)) == 3 for values in own), numbers
        assert len(set(seed)) == 1  # as in new processes: torch's own default

    play(tmp_path, scenario)


REASONS = {
    "flag": (["-B", "cases.py"], "the interpreter has the argument '-B'"),
    "inline": (["-c", "import template_cases"], "the interpreter has the argument '-c'"),
    "variable": (["early.py"], "early.py mentions OMP_NUM_THREADS"),
    "hidden": (["beside/cases.py"], "queue.py has the name of a module that is already imported"),
}


@pytest.mark.parametrize("why", REASONS)
def test_in_doubt_a_worker_is_a_new_process_and_the_reason_is_named(tmp_path: Path, why: str) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/queue.py").write_text("")
    (tmp_path / "early.py").write_text("import os, time\nos.environ['OMP_NUM_THREADS'] = '1'\ntime.sleep(100)\n")
    for folder in ("", "beside"):
        shutil.copy(CASES, tmp_path / folder / "cases.py")
    words, reason = REASONS[why]
    environment = (("PYTHONPATH", os.pathsep.join([str(tmp_path), str(CASES.parent)])),)

    async def scenario(scene: Scene) -> None:
        await scene.start(environment=environment)
        await scene.until(lambda: scene.has_joined, "an agent")
        spec = scene.spec(sys.executable, *words, log_dir=str(tmp_path / "logs"), tee=0)
        scene.send(spec)
        run = Run(scene)
        worker = await run.start("sleep")
        if why == "inline":
            assert (await run.ended(worker)).exit_code == 0
        else:
            assert not is_forked(await run.started(worker))
        texts = {m.text for m in scene.heard if isinstance(m, messages.AgentWarning)}
        assert len(texts) == 1
        assert reason in texts.pop()

    play(tmp_path, scenario)


SLEEPER = "import threading, time; threading.Thread(target=time.sleep, args=(100,), name='busy', daemon={}).start()"
NATIVE = """
import _thread, ctypes, time  # a thread of a library, which Python's threading does not know

def rest():
    ctypes.CDLL(None).prctl(15, {!r}, 0, 0, 0)
    named.release()
    time.sleep(100)

named = _thread.allocate_lock()
named.acquire()
_thread.start_new_thread(rest, ())
named.acquire()
"""
PRELOADS = {
    "thread": (SLEEPER.format(False), "starts the thread 'busy', and a fork"),
    "two": (SLEEPER.format(True) + NATIVE.format(b"pool"), "starts the threads 'busy', 'pool', and a fork"),
    "absent": ("import missing_module", "ModuleNotFoundError: No module named 'missing_module'"),
    "leaves": ("raise SystemExit(3)", "SystemExit: 3"),
    "ends": ("import os; os._exit(3)", "the template process exited with 3 while it imported this"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "the template process was killed by SIGKILL while it"),
    "hiding": ("import second", "beside/second.py has the name of a module that is already imported"),
    "jemalloc": (NATIVE.format(b"jemalloc_bg_thd"), ""),
    "helper": (SLEEPER.format(True).replace("100", "0.2"), ""),
}


@pytest.mark.parametrize("why", some(PRELOADS, "two", "leaves", "ends", "helper"))
def test_a_module_with_which_no_worker_can_fork_is_left_out_and_named(tmp_path: Path, why: str) -> None:
    """Workers fork from a template process with the other modules, and see what they see without --preload."""
    text, reason = PRELOADS[why]
    (tmp_path / "beside").mkdir()
    for folder, name, content in (("", "first", ""), ("", "noisy", text), ("", "second", ""), ("", "last", "")):
        (tmp_path / folder / f"{name}.py").write_text(content)
    if why == "hiding":
        (tmp_path / "beside/second.py").write_text("")
        (tmp_path / "noisy.py").write_text("import sys; sys.path.reverse(); " + text + "; sys.path.reverse()")
    environment = (("PYTHONPATH", str(tmp_path)),)
    script = "import json, sys; print(json.dumps([n in sys.modules for n in ('first', 'noisy', 'last')]))\n"
    (tmp_path / "beside/shown.py").write_text(script)

    async def scenario(scene: Scene) -> None:
        await scene.start(environment=environment)
        await scene.until(lambda: scene.has_joined, "an agent")
        scene.beating = asyncio.ensure_future(scene.heartbeat())
        preload, logs = ("first", "noisy", "last"), str(tmp_path / "logs")
        scene.send(scene.spec(sys.executable, "beside/shown.py", preload=preload, log_dir=logs, tee=0))
        ended, out, err = await Run(scene).case("")
        assert (ended.exit_code, json.loads(out)) == (0, [True, not reason, True]), err
        texts = [m.text for m in scene.heard if isinstance(m, messages.AgentWarning)]
        assert len(texts) == bool(reason), texts
        for text in texts:
            assert text.startswith("--preload noisy: ")
            assert reason in text
            assert text.endswith(". Workers fork from a template process that does not import noisy")

    play(tmp_path, scenario)


def in_the_guides() -> list[str]:
    """Return the values of --preload in the commands of the documents."""
    files = (*ROOT.glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    return sorted({value for text in texts for value in re.findall(r"elasticrun .*--preload ([\w.,]+)", text)})


@pytest.mark.long  # the tests of Lightning and of Transformers check that their workers fork
@pytest.mark.parametrize("value", in_the_guides())
def test_workers_fork_with_what_the_guides_preload(tmp_path: Path, value: str) -> None:
    preload = tuple(value.split(","))
    installed = [name for name in preload if importlib.util.find_spec(name.partition(".")[0])]
    script = f"import json, sys; print(json.dumps([n for n in {preload} if n in sys.modules]))"
    (tmp_path / "shown.py").write_text(script)

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "shown.py", preload=preload)
        ended, out, err = await run.case("")
        assert (ended.exit_code, json.loads(out)) == (0, installed), err
        left_out = [m.text.partition(":")[0] for m in scene.heard if isinstance(m, messages.AgentWarning)]
        assert left_out == [f"--preload {name}" for name in preload if name not in installed]

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        pytest.param("imports", signal.SIGKILL, id="imports-kill"),
        pytest.param("rest", signal.SIGKILL, id="rest-kill", marks=pytest.mark.long),
        pytest.param("request", signal.SIGKILL, id="request-kill"),
        pytest.param("imports", signal.SIGSTOP, id="imports-stop", marks=pytest.mark.long),
        pytest.param("rest", signal.SIGSTOP, id="rest-stop"),
        pytest.param("request", signal.SIGSTOP, id="request-stop", marks=pytest.mark.long),
    ],
)
def test_a_template_process_that_dies_or_stops_costs_only_time(
    tmp_path: Path, fault: signal.Signals, phase: str
) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "cases.py", heartbeat_timeout_s=1.5)
        template = await asyncio.wait_for(started_template(scene), 60)
        if phase != "imports":
            first = await run.start("sleep")
            assert is_forked(await run.started(first))
        if phase == "request":
            template.suspend()
            worker = await run.start("sleep")
            await asyncio.sleep(0.2)
            template.send_signal(fault)
        else:
            template.send_signal(fault)
            worker = await run.start("sleep")
        assert not is_forked(await run.started(worker))
        await scene.until(lambda: has_ended(template), "the end of the template process")
        if phase != "imports":
            assert psutil.pid_exists(await run.started(first))  # it lives on

        async def another_forks() -> bool:
            for _ in range(100):
                worker = await run.start("sleep")
                if is_forked(await run.started(worker)):
                    return True
                await asyncio.sleep(0.3)
            return False

        assert await another_forks()

    play(tmp_path, scenario)


def test_workers_die_with_their_agent(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "cases.py")
        pid = await run.started(await run.start("sleep"))
        assert is_forked(pid)
        template = template_of(scene)
        assert template is not None
        scene.agent.kill()
        await scene.agent.wait()
        await scene.until(lambda: not psutil.pid_exists(pid), "the end of the worker")
        await scene.until(lambda: not psutil.pid_exists(template.pid), "the end of the template process")

    play(tmp_path, scenario)


def test_thirty_workers_leave_nothing_behind(tmp_path: Path) -> None:
    shutil.copy(CASES, tmp_path / "cases.py")

    async def scenario(scene: Scene) -> None:
        run = await begin(scene, sys.executable, "cases.py")
        agent = psutil.Process(scene.agent.pid)
        for _ in range(10):
            await run.case("quick")
        template = template_of(scene)
        assert template is not None
        before = [(p.num_fds(), p.memory_info().rss) for p in (agent, template)]
        for _ in range(15):
            assert (await run.case("quick"))[0].exit_code == 7
            assert (await run.case("killed"))[0].signal == signal.SIGKILL
        after = [(p.num_fds(), p.memory_info().rss) for p in (agent, template)]
        for (fds_before, rss_before), (fds, rss) in zip(before, after, strict=True):
            assert fds <= fds_before + 1
            assert rss < rss_before + (2 << 20)

        def zombies() -> list[psutil.Process]:
            return [p for p in agent.children(recursive=True) if has_ended(p)]

        await scene.until(lambda: not zombies(), "the end of all zombies")

    play(tmp_path, scenario)
