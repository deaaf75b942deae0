"""``elasticrun --horovod``: every option of horovodrun 0.28.1 (horovod/runner/launch.py), and its meaning here."""

from __future__ import annotations

import shlex

import pytest

from elasticstate.cli import main
from elasticstate.errors import OptionError
from elasticstate.options import read_options
from tests.kit.options import parse_options

MEANT = [
    ("--num-proc 4", "-np 4"),
    ("-np 4 --min-np 2", "-np 4 --min-num-proc 2"),
    ("-np 4 --min-np 2 --max-np 8", "-np 4 --min-num-proc 2 --max-num-proc 8"),
    ("-np 2 -H a:1,b:1", "-np 2 --hosts a:1,b:1"),
    ("-np 2 -hostfile hosts", "-np 2 --hostfile hosts"),
    (
        "-np 2 --host-discovery-script ./d.sh --slots-per-host 4",
        "-np 2 --host-discovery-script ./d.sh --slots-per-host 4",
    ),
    ("-np 2 --network-interfaces eth0,eth1", "-np 2 --network-interface eth0,eth1"),
    ("-np 2 -p 2222 -i key", "-np 2 --ssh-port 2222 --ssh-identity-file key"),
    ("-np 2 --start-timeout 30 --elastic-timeout 60", "-np 2 --start-timeout 30 --elastic-timeout 60"),
    ("-np 2 --reset-limit 3", "-np 2 --reset-limit 3"),
    ("-np 2 --blacklist-cooldown-range 60 300", "-np 2 --cooldown-range 60 300"),
    ("-np 2 --output-filename logs", "-np 2 --log-dir logs"),
    ("-np 2 --verbose", "-np 2 --verbose"),
    ("-np 2 --log-level DEBUG", "-np 2 --verbose"),
    ("-np 2 --log-level INFO", "-np 2"),
    ("-np 2 --gloo", "-np 2 --backend gloo"),
    ("-np 2 --mpi", "-np 2 --backend mpi"),
    ("-np 2 --gloo-timeout-seconds 60", "-np 2 --collective-timeout 60"),
    (
        "-np 2 --timeline-filename t.json --timeline-mark-cycles",
        "-np 2 --timeline-filename t.json --timeline-mark-cycles",
    ),
    ("-np 2 --no-timeline-mark-cycles --stall-check", "-np 2"),
    ("-np 2 --no-stall-check", "-np 2 --stall-check-time off"),
    ("-np 2 --stall-check-warning-time-seconds 9", "-np 2 --stall-check-time 9"),
    ("-np 2 --stall-check-shutdown-time-seconds 99", "-np 2 --stall-shutdown-time 99"),
]
IGNORED = [
    "--disable-cache",
    "--fusion-threshold-mb 32",
    "--cycle-time-ms 3.5",
    "--cache-capacity 2048",
    "--hierarchical-allreduce",
    "--no-hierarchical-allreduce",
    "--hierarchical-allgather",
    "--no-hierarchical-allgather",
    "--autotune",
    "--no-autotune",
    "--autotune-log-file f.csv",
    "--autotune-warmup-samples 3",
    "--autotune-steps-per-sample 10",
    "--autotune-bayes-opt-max-samples 20",
    "--autotune-gaussian-process-noise 0.8",
    "--mpi-threads-disable",
    "--no-mpi-threads-disable",
    "--num-nccl-streams 1",
    "--thread-affinity 0",
    "--log-level WARNING",
    "--log-level ERROR",
    "--log-level FATAL",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--log-hide-timestamp",
    "--no-log-hide-timestamp",
]
REFUSED = [
    ("-cb", "Use --check"),
    ("--check-build", "Use --check"),
    ("--config-file f.yaml", "ELASTICSTATE_<OPTION>"),
    ("--mpi-args=--verbose", "calls mpirun itself"),
    ("--binding-args=--x", "--bind"),
    ("--numa-binding socket", "node or exclusive"),
    ("--tcp", "NCCL_IB_DISABLE=1"),
    ("--jsrun", "starts the workers itself"),
    ("-prefix-timestamp", "--events-file"),
    ("--prefix-output-with-timestamp", "--events-file"),
]


def parse(text: str, *more: str) -> object:
    return parse_options([*more, *shlex.split(text), "python", "t.py"])


@pytest.mark.parametrize(("theirs", "ours"), MEANT)
def test_options_have_their_meaning(theirs: str, ours: str) -> None:
    assert parse(theirs, "--horovod") == parse(ours, "--horovod")


@pytest.mark.parametrize("option", IGNORED)
def test_options_that_tune_horovod_have_no_effect(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = option.split()[0]
    assert parse(f"-np 2 {option}", "--horovod") == parse("-np 2", "--horovod")
    assert capsys.readouterr().err == f"elasticrun: without effect: {name}\n"
    with pytest.raises(OptionError, match=f"^{name}: .*Leave this option out"):
        parse(f"-np 2 {option}")


@pytest.mark.parametrize(("option", "alternative"), REFUSED)
@pytest.mark.parametrize("more", [(), ("--horovod",)])
def test_other_options_are_refused_with_the_alternative(option: str, alternative: str, more: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        parse(f"-np 2 {option}", *more)
    assert alternative in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--horovod", "-v"])
    assert capsys.readouterr().out.startswith("elasticstate ")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("-np 4", (4, 4, 4)),
        ("-np 4 -H a:4,b:4", (4, 4, 4)),
        ("-np 4 --max-np 8 -H a:4,b:4", (4, 4, 8)),
        ("-np 4 --min-np 2 -H a:4,b:4", (4, 2, None)),
        ("-np 4 --min-np 2 --max-np 6 -H a:4,b:4", (4, 2, 6)),
        ("-np 4 --host-discovery-script d.sh", (4, 4, None)),
    ],
)
def test_sizes_have_horovodruns_defaults(text: str, sizes: tuple[int, int, int | None]) -> None:
    options = parse_options(["--horovod", *text.split(), "t.py"])
    assert (options.np, options.min_np, options.max_np) == sizes


def test_a_job_that_is_not_elastic_ends_with_its_first_failure() -> None:
    assert parse_options(["--horovod", "-np", "4", "t.py"]).reset_limit == 0
    assert parse_options(["--horovod", "-np", "4", "--reset-limit", "off", "t.py"]).reset_limit is None
    assert parse_options(["--horovod", "-np", "4", "--min-np", "4", "t.py"]).reset_limit is None
    assert parse_options(["-np", "4", "t.py"]).reset_limit is None


def test_the_first_world_needs_np_and_changes_count() -> None:
    policy = parse_options(["--horovod", "-np", "4", "--min-np", "2", "t.py"]).policy()
    assert (policy.fewest(0), policy.fewest(1), policy.counts_changes) == (4, 2, True)
    policy = parse_options(["-np", "4", "--min-np", "2", "t.py"]).policy()
    assert (policy.fewest(0), policy.fewest(1), policy.counts_changes) == (2, 2, False)
    with pytest.raises(OptionError, match="have 3 slots, fewer than -np, which is 4"):
        parse_options(["--horovod", "-np", "4", "--min-np", "2", "-H", "a:3", "t.py"])


def test_horovods_time_outs_are_read_from_the_environment() -> None:
    variables = {"HOROVOD_START_TIMEOUT": "31", "HOROVOD_ELASTIC_TIMEOUT": "61"}
    options = read_options({"np": "1", "horovod": "1"}, ["t.py"], variables)
    assert (options.start_timeout_s, options.elastic_timeout_s) == (31, 61)
    options = read_options({"np": "1", "horovod": "1", "start_timeout_s": "5"}, ["t.py"], variables)
    assert (options.start_timeout_s, options.elastic_timeout_s) == (5, 61)
    assert read_options({"np": "1"}, ["t.py"], variables).start_timeout_s == 600
