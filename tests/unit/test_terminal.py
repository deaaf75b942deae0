"""Text from outside that our own lines quote cannot control the terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elasticstate.agent.agent import Agent
from elasticstate.cli import main
from elasticstate.driver.report import Report
from elasticstate.failures import WorkerFailure
from elasticstate.net.messages import Launch
from elasticstate.terminal import message, printable

FLUSH_S = 10.0
HOSTILE = "\x1b]0;owned\x07 \x1b[2J \r10% \x08\x7f \x9b31m \u202egnp.exe \u2066 \udcff end"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_control_characters_are_escaped_and_words_are_not() -> None:
    assert printable("größe: 3 µs, 日本, 'a'\n\tb") == "größe: 3 µs, 日本, 'a'\n\tb"
    assert printable("\x1b[31m\r\x07\x9b\u202e\udcff") == r"\x1b[31m\r\x07\x9b\u202e\udcff"
    assert is_harmless(printable("".join(map(chr, range(0x110000)))))


def test_further_lines_cannot_pass_for_a_message() -> None:
    assert message("elasticrun", "a\nelasticrun: root cause: b\n") == "elasticrun: a\n  elasticrun: root cause: b\n"


def test_the_drivers_lines_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    report = Report("j", None, verbose=True)
    report.event("warning", {"generation": 1, "text": f"host discovery: {HOSTILE}"})
    report.event("agent_lost", {"generation": 1, "host": HOSTILE, "reason": HOSTILE})
    report.reason(HOSTILE)
    asyncio.run(report.close(FLUSH_S))
    said = capfd.readouterr().err
    assert said.count("end") == 4
    assert is_harmless(said)


def test_the_agents_lines_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    launch = Launch("a", "id", 0, (), "t" * 32, 1.0, 1.0, "", "", "/", "/", ())
    agent = Agent(launch)
    agent.outputs.complain(HOSTILE)
    (stderr,) = agent.outputs._writers["stderr"]
    asyncio.run(stderr.flushed(FLUSH_S))
    stderr.close()
    said = capfd.readouterr().err
    assert said.startswith("elasticstate: agent of a: ")
    assert is_harmless(said)


def test_a_failure_as_launch_raises_it_is_escaped_and_keeps_its_lines() -> None:
    shown = str(WorkerFailure("boom " + HOSTILE, error=f"Traceback:\n  line 1\nValueError: {HOSTILE}"))
    assert is_harmless(shown)
    assert shown.splitlines()[1:3] == ["  Traceback:", "    line 1"]


def test_the_command_lines_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-np", HOSTILE, "true"]) == 2
    assert main(["status", HOSTILE]) == 1
    assert is_harmless(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["\x1b[31mred", "../../etc", "a b", "", "a:1"])
def test_an_agent_cannot_choose_a_name_that_is_no_host_name(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    assert main(["agent", "--join", "127.0.0.1:1", "--token-file", str(token), "--name", name, "--wait", "0"]) == 2
    assert "--name" in capsys.readouterr().err
