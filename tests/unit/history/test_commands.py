"""The commands ``trace`` and ``report`` of the command line: their files, their help and their errors."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from elasticstate.cli import main
from tests.kit.chrome_format import checked
from tests.kit.events import killed_and_restarted

COMMANDS = {"trace": "trace.json", "report": "report.html"}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_file_is_written_and_its_use_explained(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    killed_and_restarted(tmp_path / "events").path.chmod(0o640)
    assert main([command, "events"]) == 0
    captured = capsys.readouterr()
    written = tmp_path / COMMANDS[command]
    assert re.match(rf"{written.name}: .*job-1\. Open it (at|in) ", captured.out)
    assert captured.err == ""
    assert stat.S_IMODE(written.stat().st_mode) == 0o640, "who may read the events may read the file"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["events", written.name])
    if command == "trace":
        assert checked(written)
    else:
        assert written.read_text().startswith("<!DOCTYPE html>")


def test_help_explains_the_command_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"elasticrun {command} events.jsonl -o {COMMANDS[command]}" in text
    assert "Open the file" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_help_of_elasticrun_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "elasticrun trace EVENTS -o trace.json" in text
    assert "elasticrun report EVENTS... -o report.html" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "COMMAND: the following arguments are required: EVENTS. elasticrun COMMAND --help explains the command."),
        (["events", "--out", "x"], "COMMAND: unrecognized arguments: --out"),
        (["absent"], "'absent': cannot be read (No such file or directory). Name a file that"),
        (["."], "'.': cannot be read (Is a directory)"),
        (["text"], "'text': line 1 is no event (not JSON: "),
        (["empty"], "'empty': has no complete event. Name a file that"),
        (["events", "-o", "absent/x"], "-o/--output: 'absent/x': 'absent' is not a directory. Make it, or"),
        (["events", "-o", "text/x"], "-o/--output: 'text/x': 'text' is not a directory"),
        (["events", "-o", "."], "-o/--output: '.': is not a regular file"),
        (["events", "-o", "/dev/null"], "-o/--output: '/dev/null': is not a regular file"),
        (["events", "-o", "./events"], "-o/--output: './events': is an event file"),
        (["events", "-o", "x" * 300], f"-o/--output: '{'x' * 300}': cannot be written (File name too long)"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    command: str,
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    killed_and_restarted(tmp_path / "events")
    (tmp_path / "text").write_text("no events\n")
    (tmp_path / "empty").touch()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([command, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"elasticrun: {text.replace('COMMAND', command)}")
    assert captured.err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_the_old_file_and_no_half_file(command: str, tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk."""
    events = killed_and_restarted(tmp_path / "events").path
    (tmp_path / "out").write_text("old")
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    program = f"{limit}from elasticstate.cli import main; raise SystemExit(main({[command, str(events), '-o', 'out']}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "elasticrun: -o/--output: 'out': cannot be written (File too large). Name a file that this user can write.\n"
    )
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["events", "out"]


@pytest.mark.parametrize("absent", ["jinja2", "matplotlib"])
def test_a_report_without_its_libraries_names_the_extra(absent: str, tmp_path: Path) -> None:
    """The name of the library leads nowhere; the trace does not need it."""
    events = killed_and_restarted(tmp_path / "events").path
    for command, status in (("trace", 0), ("report", 2)):
        program = f"import sys; sys.modules[{absent!r}] = None; "
        program += f"from elasticstate.cli import main; raise SystemExit(main({[command, str(events)]}))"
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
    text = f"report: {absent} cannot be imported. Run pip install 'elasticstate[report]'."
    assert done.stderr == f"elasticrun: {text}\n"
    assert not (tmp_path / "report.html").exists()
