"""The command line: what belongs to elasticrun, what to COMMAND, and one line for each mistake."""

from __future__ import annotations

import pytest

from elasticstate.cli import main, parse_options
from elasticstate.config import option_names


def test_options_of_the_command_are_untouched() -> None:
    options = parse_options(["-np", "2", "--min-np", "1", "python", "t.py", "--min-np", "9", "--", "-np", "3"])
    assert (options.np, options.min_np) == (2, 1)
    assert options.command == ("python", "t.py", "--min-np", "9", "--", "-np", "3")


def test_two_dashes_may_stand_before_the_command() -> None:
    assert parse_options(["-np", "2", "--", "python", "--version"]).command == ("python", "--version")


def test_both_values_of_a_range_are_taken() -> None:
    assert parse_options(["-np", "1", "--cooldown-range", "1", "2.5", "x"]).cooldown_range_s == (1, 2.5)


def test_tags_are_turned_off() -> None:
    assert not parse_options(["-np", "1", "--no-tag-output", "x"]).tag_output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-np", "x", "c"], "-np/--num-proc: 'x': takes a whole number, at least 1"),
        (["-np"], "-np/--num-proc: expected one argument: takes a whole number, at least 1"),
        (["--nope", "-np", "1", "c"], "unrecognized arguments: --nope"),
        (["--min", "1", "-np", "1", "c"], "unrecognized arguments: --min"),
        (["c"], "-np/--num-proc is missing: takes the number of workers to start with"),
        (["-np", "1", "--events-file", "/nowhere/e", "c"], "--events-file: '/nowhere/e': takes a path to write to"),
        (["status"], "status takes the name of one job: elasticrun status JOB"),
    ],
)
def test_a_mistake_is_told_in_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"elasticrun: {said}")
    assert captured.err.count("\n") == 1


def test_help_names_every_option_with_its_default_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in option_names().values():
        assert all(name in text for name in option.names)
    assert "elasticrun -np 4 python train.py" in text
    assert "(default: 10 600)" in text
    assert max(map(len, text.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("elasticstate 0")


def test_status_of_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "no-such-job"]) == 1
    assert capsys.readouterr().err == "elasticrun: no job 'no-such-job' of yours runs on this machine\n"


def test_an_elastic_command_line_of_horovodrun_means_the_same() -> None:
    old = "--num-proc 8 --min-num-proc 4 --max-num-proc 12 --host-discovery-script ./d.sh --slots-per-host 2 -p 2222"
    old += " -i key --elastic-timeout 300 --reset-limit 3 --blacklist-cooldown-range 60 300 --start-timeout 30"
    new = "-np 8 --min-np 4 --max-np 12 --host-discovery-script ./d.sh --slots-per-host 2 --ssh-port 2222"
    new += " --ssh-identity-file key --elastic-timeout 300 --reset-limit 3 --cooldown-range 60 300 --start-timeout 30"
    options = parse_options([*old.split(), "--verbose", "python", "t.py"])
    assert options == parse_options([*new.split(), "--verbose", "python", "t.py"])
    assert (options.min_np, options.max_np, options.cooldown_range_s, options.ssh_port) == (4, 12, (60, 300), 2222)


def test_a_mistake_is_told_when_there_is_only_something_to_check_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--backend", "smoke"]) == 2
    assert capsys.readouterr().err == "elasticrun: --backend: 'smoke': takes auto, nccl, gloo or mpi\n"
