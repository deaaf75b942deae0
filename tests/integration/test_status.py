"""``elasticrun status JOB --watch`` next to a real job whose driver dies and is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate.cli import main
from tests.kit.elasticrun import running, started
from tests.kit.terminal import Terminal

STATUS = [sys.executable, "-m", "elasticstate", "status"]


def test_the_watch_goes_on_with_the_next_driver_until_the_job_ends(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "--stop-timeout", "0.5", "sleep", "100") as job:
        started(job, 1)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        watches = [
            subprocess.Popen([*STATUS, job.name, "--watch", "0.1", *more], **pipes)  # type: ignore[call-overload]
            for more in ((), ("--json",))
        ]
        texts, numbers = watches
        first = texts.stdout.readline()
        assert first.startswith(f"job {job.name}: WAITING")
        documents = [json.loads(numbers.stdout.readline()) for _ in range(2)]
        assert {document["job"] for document in documents} == {job.name}
        assert documents[0]["phase_s"] < documents[1]["phase_s"]

        job.process.kill()
        job.process.wait()
        unanswered = f"the driver of job {job.name!r} does not answer: "
        assert unanswered in numbers.stderr.readline()
        assert any(line.startswith(unanswered) for line in iter(texts.stdout.readline, ""))

        following = [sys.executable, "-m", "elasticstate", "--reattach", job.name]
        with subprocess.Popen(following, cwd=tmp_path, stderr=subprocess.DEVNULL) as driver:
            assert any(line.startswith(f"job {job.name}: ") for line in iter(texts.stdout.readline, ""))
            assert json.loads(numbers.stdout.readline())["job"] == job.name
            driver.terminate()
            assert driver.wait(60) == 143
        shown, rest = texts.stdout.read(), numbers.stdout.read()
        assert shown.endswith(f"\njob {job.name} has ended\n")
        assert all(json.loads(line)["job"] == job.name for line in rest.splitlines())
        for watch in watches:
            assert watch.wait(60) == 0
            watch.communicate()
        job.process.communicate()


def test_on_a_terminal_each_status_replaces_the_last_one(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "--stop-timeout", "0.5", "sleep", "100") as job:
        started(job, 1)
        with Terminal(tmp_path, *STATUS, job.name, "--watch", "0.1") as terminal:
            seen: set[str] = set()

            def three_times() -> bool:
                found = [row for row in terminal.rows if row.startswith(f"job {job.name}: ")]
                assert len(found) <= 1
                seen.update(found)
                return len(seen) >= 3

            terminal.until(three_times, "three statuses")
            terminal.keys(b"\x03")
            terminal.read_to_the_end()
            assert terminal.process.wait(60) == 130
        assert terminal.bytes.rindex(b"\x1b[?25h") > terminal.bytes.rindex(b"\x1b[?25l")  # the cursor is shown again
        job.process.terminate()
        job.end()


def test_a_reader_that_leaves_ends_the_watch(tmp_path: Path) -> None:
    with running(tmp_path, "-np", "1", "--stop-timeout", "0.5", "sleep", "100") as job:
        started(job, 1)
        shell = f"{' '.join(STATUS)} {job.name} --watch 0.1 | head -n 1"
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith(f"job {job.name}: ")
        assert done.stderr == ""
        job.process.terminate()
        job.end()


def test_mistakes_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "no-such-job", "--watch"]) == 1
    assert capsys.readouterr().err == "elasticrun: no job 'no-such-job' of this user runs on this machine\n"
    assert main(["status", "x", "--watch", "often"]) == 2
    assert capsys.readouterr().err == "elasticrun: --watch: 'often': must be a number of seconds, at least 0.1\n"
    with pytest.raises(SystemExit) as caught:
        main(["status", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--watch", "--json", "--agent", "130 Ctrl-C"))
