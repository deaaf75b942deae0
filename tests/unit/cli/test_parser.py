"""The command line: options of elasticrun, options of COMMAND, and one line of error for each mistake."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from elasticstate.cli import main
from elasticstate.errors import OptionError
from elasticstate.options import declarations
from tests.kit.options import parse_options


def test_options_of_the_command_are_untouched() -> None:
    options = parse_options(["-np", "2", "--min-np", "1", "python", "t.py", "--min-np", "9", "--", "-np", "3"])
    assert (options.np, options.min_np) == (2, 1)
    assert options.command == ("python", "t.py", "--min-np", "9", "--", "-np", "3")


def test_two_dashes_may_stand_before_the_command() -> None:
    assert parse_options(["-np", "2", "--", "python", "--version"]).command == ("python", "--version")


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_a_module_is_run_by_this_python(flag: str) -> None:
    options = parse_options(["-np", "1", flag, "pkg.train", "--lr", "1"])
    assert options.command == (sys.executable, "-u", "-m", "pkg.train", "--lr", "1")


def test_another_python_than_that_of_elasticrun_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)  # as in another virtual environment
    parse_options(["-np", "1", str(other), "train.py"])
    assert capsys.readouterr().err.startswith(
        f"elasticrun: COMMAND runs with {other}, and elasticrun with {sys.executable}. If the former has no "
    )
    for same in (sys.executable, "python", "train.py"):
        parse_options(["-np", "1", same])
        assert capsys.readouterr().err == ""


def test_it_is_said_how_many_workers_there_are_if_nobody_has_said_it(capsys: pytest.CaptureFixture[str]) -> None:
    parse_options(["-H", "a:2,b:3", "x"])
    assert capsys.readouterr().err == "elasticrun: -np is not given: 5 workers, one for each slot of the hosts\n"
    parse_options(["-np", "5", "-H", "a:2,b:3", "x"])
    assert capsys.readouterr().err == ""


def test_both_values_of_a_range_are_taken() -> None:
    assert parse_options(["-np", "1", "--cooldown-range", "1", "2.5", "x"]).cooldown_range_s == (1, 2.5)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-np", "x", "c"], "-np/--num-proc: 'x': must be a whole number, at least 1"),
        (["-np"], "-np/--num-proc: expected one argument: must be a whole number, at least 1"),
        (["--frobnicate", "-np", "1", "c"], "unknown option '--frobnicate'. elasticrun --help-all lists all options"),
        (["--min", "1", "-np", "1", "c"], "unknown option '--min'. Did you mean --min-np?"),
        (["--host-file", "f", "-np", "1", "c"], "unknown option '--host-file'. Did you mean --hostfile?"),
        (["--min_np=1", "-np", "1", "c"], "unknown option '--min_np'. Did you mean --min-np?"),
        (["--np=2", "c"], "unknown option '--np'. Did you mean -np?"),
        (["-np2", "c"], "unknown option '-np2'. Write -np 2"),
        (["--hostfile", "f", "c"], "-np/--num-proc is missing. Give the number of workers to start with."),
        (
            ["c", "-np", "2"],
            "-np/--num-proc is missing: '-np' after COMMAND belongs to COMMAND. Write options before COMMAND.",
        ),
        ([], "COMMAND is missing"),
        (["stauts", "job"], "no program is called 'stauts'. Did you mean elasticrun status?"),
        (["reprot", "events"], "no program is called 'reprot'. Did you mean elasticrun report?"),
        (["-np", "1", "--events-file", "/nowhere/e", "c"], "--events-file: '/nowhere/e': cannot be written"),
        (["status"], "status: '': must be the name of one job. Use elasticrun status JOB [--json] [--watch [S]]."),
    ],
)
def test_a_mistake_is_told_in_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"elasticrun: {said}")
    assert captured.err.count("\n") == 1


def test_a_program_with_the_name_of_a_misspelled_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stats").write_text("")
    assert main(["stats", "-np", "2"]) == 2
    assert "'-np' after COMMAND" in capsys.readouterr().err


def shown_by(option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    return text


def test_help_names_each_everyday_option_with_its_default_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_by("--help", capsys)
    for option in declarations().values():
        assert (f"  {', '.join(option.names)}" in text) is not option.is_rare
    assert "elasticrun -np 4 train.py" in text
    assert "(default: 10 600)" in text


def test_help_of_all_options_names_those_of_other_launchers_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_by("--help-all", capsys)
    for option in declarations().values():
        assert f"  {', '.join(option.names)}" in text
    assert "--nproc-per-node" in text
    assert "--fusion-threshold-mb" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("elasticstate 0")


def test_status_of_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "no-such-job"]) == 1
    assert capsys.readouterr().err == "elasticrun: no job 'no-such-job' of this user runs on this machine\n"


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
    assert capsys.readouterr().err == "elasticrun: --backend: 'smoke': must be auto, nccl, nccl2, gloo or mpi\n"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--nproc-per-node 4", "-np 4"),
        ("--nproc_per_node=4 --nnodes=1", "-np 4"),
        ("--nnodes 1:1 --standalone --nproc-per-node 2 --max-restarts 3", "-np 2 --reset-limit 3"),
        ("-n 2 --gloo", "-np 2 --backend gloo"),
        ("-np 2 --no-stall-check", "-np 2 --stall-check-time off"),
        ("-np 2 --stall-check", "-np 2"),
        ("-np 2 --stall-check-warning-time-seconds 9", "-np 2 --stall-check-time 9"),
        ("-np 2 --stall-check-shutdown-time-seconds 90", "-np 2 --stall-shutdown-time 90"),
        ("-np 2 --mpi --output-filename logs", "-np 2 --backend mpi --log-dir logs"),
        ("-np 2 --log-level DEBUG", "-np 2 --verbose"),
        ("-np 2 --log-level info", "-np 2"),
    ],
)
def test_options_of_other_launchers_mean_the_same(theirs: str, ours: str) -> None:
    assert parse_options([*theirs.split(), "t.py"]) == parse_options([*ours.split(), "t.py"])


def test_nproc_per_node_counts_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    assert parse_options(["--nproc-per-node", "cpu", "c"]).np == cores
    monkeypatch.setattr("elasticstate.machine.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"])
    assert (
        parse_options(["--nproc-per-node", "gpu", "c"]).np == parse_options(["--nproc-per-node", "auto", "c"]).np == 3
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert parse_options(["--nproc-per-node", "gpu", "c"]).np == 2
    monkeypatch.setattr("elasticstate.machine.glob", lambda pattern: [])
    assert parse_options(["--nproc-per-node", "auto", "c"]).np == cores
    with pytest.raises(OptionError, match=r"^--nproc-per-node: 'gpu': this machine has no NVIDIA GPU"):
        parse_options(["--nproc-per-node", "gpu", "c"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--nnodes 2:4 --nproc-per-node 8", "--nnodes: '2:4': .* -np 32 --min-np 16 --max-np 32, .*-H, --hostfile"),
        ("--nnodes 2", "--nnodes: '2': .* -np "),
        ("--nnodes x", "--nnodes: 'x': must be"),
        ("--nproc-per-node 0", "--nproc-per-node: '0': must be"),
        ("--nproc-per-node 2 -np 3", "--nproc-per-node and -np exclude each other"),
        ("--nproc-per-node 2 -H a:2", "--nproc-per-node.* -H"),
        ("-np 2 -H a:2 --max-restarts 1", "--max-restarts counts .*--reset-limit"),
        ("-np 2 --max-restarts x", "--reset-limit: 'x': must be a whole number"),
        ("-np 2 --no-stall-check --stall-check-time 9", "--no-stall-check and --stall-check-time exclude"),
        ("-np 2 --gloo --mpi", "--mpi and --backend exclude each other"),
        ("-np 2 --log-level error", "--log-level: 'error': .*--verbose"),
        ("-np 2 --rdzv-backend c10d", "--rdzv-backend: .*--listen"),
        ("-np 2 --rdzv_endpoint=h:1", "--rdzv_endpoint: .*--listen"),
        ("-np 2 --rdzv-id=x", "--rdzv-id: .*--job-name"),
        ("-np 2 --redirects 3", "--redirects: .*--log-dir"),
        ("-np 2 --check-build", "--check-build: .*--check"),
        ("-np 2 --fusion-threshold-mb 3", "--fusion-threshold-mb: "),
    ],
)
def test_options_of_other_launchers_that_mean_something_else_name_ours(given: str, said: str) -> None:
    with pytest.raises(OptionError, match=f"^{said}") as caught:
        parse_options([*given.split(), "c"])
    assert "\n" not in str(caught.value)


def test_a_busy_port_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        assert main(["-np", "1", "--listen", address, "--token-file", str(tmp_path / "token"), "true"]) == 2
    said = (
        f"elasticrun: --listen: {address!r}: Address already in use. Give an address of this machine and a free port.\n"
    )
    assert capsys.readouterr().err == said
