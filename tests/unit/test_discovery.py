"""Host discovery, with real scripts and files."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elasticstate.core.ids import HostSlots
from elasticstate.discovery import Discovery, DiscoveryFault, Hosts, host_source, parse_hosts, run_script
from elasticstate.errors import DiscoveryError
from elasticstate.options import Options, options as declared, read_options


def hosts(*named: tuple[str, int]) -> Hosts:
    return tuple(HostSlots(*each) for each in named)


def script(path: Path, body: str) -> str:
    """Put an executable in place of an existing one, atomically."""
    new = path.with_suffix(".new")
    new.write_text(f"#!/bin/sh\n{body}\n")
    new.chmod(new.stat().st_mode | stat.S_IXUSR)
    new.replace(path)
    return str(path)


def options(**given: str) -> Options:
    return read_options({"np": "1", "discovery_interval_s": "0.05", **given}, ["x"], {})


class Watch:
    """A running discovery, with its answers and warnings."""

    def __init__(self, chosen: Options, refused: str = "") -> None:
        self.answers: list[Hosts] = []
        self.warnings: list[str] = []
        self._discovery = Discovery(
            host_source(chosen), lambda host: f"{host} is refused" if host == refused else "", self.warnings.append
        )

    async def run(self, meanwhile: Callable[[Watch], Awaitable[None]]) -> None:
        self.answers.append(await self._discovery.first())
        following = asyncio.ensure_future(self._follow())
        try:
            await meanwhile(self)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        async for answer in self._discovery.changes():
            self.answers.append(answer)

    async def until(self, condition: Callable[[], bool]) -> None:
        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        try:
            await asyncio.wait_for(look(), 60)
        except asyncio.TimeoutError:
            pytest.fail(f"answers {self.answers}, warnings {self.warnings}")


def test_hosts_are_read_line_by_line() -> None:
    text = "# our hosts\na:2\n\n  b   # the slow one\nc slots=4\r\na:1\n"
    assert parse_hosts(text, 8) == hosts(("a", 3), ("b", 8), ("c", 4))
    assert parse_hosts("", 1) == ()
    assert parse_hosts("A:2\nb\na:1\nB", 8) == hosts(("A", 3), ("b", 16)), "names have no case"
    assert parse_hosts("a:2 rack=x\nb\na:1\n", 1) == (HostSlots("a", 3, "x"), HostSlots("b", 1))
    with pytest.raises(DiscoveryFault, match=r"^host a is in rack x and in rack y\. Name one rack$"):
        parse_hosts("a rack=x\na rack=y\n", 1)
    with pytest.raises(DiscoveryFault, match="'oops, no' is not a host") as caught:
        parse_hosts("a:2\noops, no\n", 1)
    assert caught.value.kind == "malformed"
    with pytest.raises(DiscoveryFault, match="is not a host") as caught:
        parse_hosts("a:" + "9" * 1_000_000, 1)
    assert len(str(caught.value)) < 200


def test_without_anything_the_host_is_localhost_with_np_slots() -> None:
    async def nothing(_: Watch) -> None: ...

    watch = Watch(read_options({"np": "3"}, ["x"], {}))
    asyncio.run(watch.run(nothing))
    assert watch.answers == [hosts(("localhost", 3))]


def test_the_list_of_the_command_line_is_taken_with_slots_per_host() -> None:
    async def nothing(_: Watch) -> None: ...

    watch = Watch(read_options({"np": "3", "hosts": "a:2,b", "slots_per_host": "4"}, ["x"], {}))
    asyncio.run(watch.run(nothing))
    assert watch.answers == [hosts(("a", 2), ("b", 4))]


def test_a_hostfile_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a:1\n")

    async def change(watch: Watch) -> None:
        file.write_text("a:1\nb:2\n")
        await watch.until(lambda: len(watch.answers) == 2)
        file.unlink()
        await watch.until(lambda: bool(watch.warnings))

    watch = Watch(options(hostfile=str(file)))
    asyncio.run(watch.run(change))
    assert watch.answers == [hosts(("a", 1)), hosts(("a", 1), ("b", 2))]
    assert watch.warnings == [
        f"host discovery failed: hostfile {file} could not be read: No such file or directory; "
        "using the last valid answer"
    ]


def test_a_name_in_other_case_is_no_other_host(tmp_path: Path) -> None:
    path = script(tmp_path / "discover.sh", "echo LocalHost:2; echo gpu-7:1")

    async def change(watch: Watch) -> None:
        script(tmp_path / "discover.sh", "echo localhost:2; echo GPU-7:1; echo b")
        await watch.until(lambda: len(watch.answers) == 2)

    watch = Watch(options(host_discovery_script=path))
    asyncio.run(watch.run(change))
    first = [("LocalHost", 2), ("gpu-7", 1)]
    assert watch.answers == [hosts(*first), hosts(*first, ("b", 1))]
    assert watch.warnings == []


@pytest.mark.parametrize(
    ("body", "timeout_s", "said"),
    [
        ("echo a:1; echo no luck >&2; exit 3", 60, r"exited with 3: no luck$"),
        ("echo 'a:1:2'", 60, "'a:1:2' is not a host: must be host or host:slots"),
        ("sleep 100", 0.5, "did not end within 0.5 s"),
        ("echo far:1", 60, "far is refused"),
    ],
)
def test_the_first_answer_must_be_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float, said: str
) -> None:
    monkeypatch.setattr(declared, "_SHORTEST_DISCOVERY_S", timeout_s)

    async def never(_: Watch) -> None:
        pytest.fail("the first answer was taken")

    path = script(tmp_path / "discover.sh", body)
    watch = Watch(options(host_discovery_script=path), refused="far")
    with pytest.raises(DiscoveryError, match=said):
        asyncio.run(watch.run(never))


@pytest.mark.parametrize(
    ("body", "timeout_s", "said"),
    [
        ("exit 3", 60, "exited with 3: no output on stderr"),
        ("echo 'x y z'", 60, "'x y z' is not a host"),
        ("sleep 100", 2, "did not end within 2 s"),
        ("echo far:1", 60, "far is refused"),
    ],
)
def test_a_bad_answer_later_changes_nothing_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float, said: str
) -> None:
    monkeypatch.setattr(declared, "_SHORTEST_DISCOVERY_S", timeout_s)
    path = tmp_path / "discover.sh"
    script(path, "echo a:1")
    calls = tmp_path / "calls"

    async def spoil(watch: Watch) -> None:
        script(path, f"echo >> {calls}\n{body}")
        await watch.until(lambda: calls.exists() and calls.read_text().count("\n") >= 3)
        assert watch.answers == [hosts(("a", 1))]
        script(path, "echo b:1")
        await watch.until(lambda: len(watch.answers) == 2)

    watch = Watch(options(host_discovery_script=str(path)), refused="far")
    asyncio.run(watch.run(spoil))
    assert watch.answers == [hosts(("a", 1)), hosts(("b", 1))]
    assert len(watch.warnings) == 1
    assert said in watch.warnings[0]


def test_an_empty_answer_counts_when_it_is_given_twice_in_a_row(tmp_path: Path) -> None:
    path, calls = tmp_path / "discover.sh", tmp_path / "calls"
    script(path, "echo a:1")

    async def empty(watch: Watch) -> None:
        script(path, f"echo >> {calls}\n[ $(wc -l < {calls}) -eq 2 ] || echo a:1")  # empty on the second call only
        await watch.until(lambda: calls.exists() and calls.read_text().count("\n") >= 4)
        assert watch.answers == [hosts(("a", 1))]
        script(path, "")
        await watch.until(lambda: len(watch.answers) == 2)

    watch = Watch(options(host_discovery_script=str(path)))
    asyncio.run(watch.run(empty))
    assert watch.answers == [hosts(("a", 1)), ()]
    assert watch.warnings == []


def test_a_script_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    path = script(tmp_path / "discover.sh", f"sleep 100 &\necho $! $$ > {pids}\nwait")

    async def run() -> None:
        with pytest.raises(DiscoveryFault, match="did not end within") as caught:
            await run_script(path, 2)
        assert caught.value.kind == "timeout"

    asyncio.run(run())
    deadline = time.monotonic() + 20
    for pid in map(int, pids.read_text().split()):
        while (state := _state(pid)) not in ("", "Z"):
            assert time.monotonic() < deadline, f"{pid} lives: {state}"
            time.sleep(0.001)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_script_may_have_arguments_and_need_not_be_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "discover.sh", 'echo "$1:$2"')
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(run_script("discover.sh a 3", 5)) == "a:3\n"


def test_a_command_may_be_a_pipeline_or_a_script_without_an_interpreter_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b:1\na:2\nc:9\n")
    command = f"sort {tmp_path}/hosts | grep -v '^c' && echo \"d:$((1 + 2))\""
    assert asyncio.run(run_script(command, 5)) == "a:2\nb:1\nd:3\n"
    plain = tmp_path / "with a blank.sh"
    plain.write_text("echo a:1\n")
    plain.chmod(0o700)
    assert asyncio.run(run_script(str(plain), 5)) == "a:1\n"
    assert asyncio.run(run_script(f"'{plain}' ignored", 5)) == "a:1\n"


def test_a_script_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("echo a")
    for command, said in (
        (
            str(plain),
            rf"{plain} could not be started: .*Permission denied.*\. Make the file executable: chmod \+x {plain}$",
        ),
        (str(tmp_path / "nope"), "nope could not be started: .*No such file"),
        (f"{tmp_path}/nope | cat >&2; exit 3", "exited with 3: .*nope: not found"),
    ):
        with pytest.raises(DiscoveryFault, match=said):
            asyncio.run(run_script(command, 5))


def test_a_cancellation_at_the_moment_a_script_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12, asyncio.wait_for would return the answer, and the driver would never end."""
    command = script(tmp_path / "discover", "echo a:1")
    wait, asked = asyncio.subprocess.Process.wait, 0

    async def scenario() -> None:
        async def ended_as_the_job_ends(process: asyncio.subprocess.Process) -> int:
            nonlocal asked
            exit_code = await wait(process)
            asked += 1
            if asked == 1:
                asking.cancel()
            return exit_code

        monkeypatch.setattr(asyncio.subprocess.Process, "wait", ended_as_the_job_ends)
        asking = asyncio.ensure_future(run_script(command, 5))
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())


@pytest.mark.parametrize("steps", range(0, 24, 2))
def test_a_cancellation_while_a_script_is_started_leaves_nothing(tmp_path: Path, steps: int) -> None:
    """The script may have started by then or not. A check after every test finds processes that are left."""
    command = script(tmp_path / "discover", "sleep 100")

    async def scenario() -> None:
        asking = asyncio.ensure_future(run_script(command, 50))
        for _ in range(steps):
            await asyncio.sleep(0.001 if steps > 12 else 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())
