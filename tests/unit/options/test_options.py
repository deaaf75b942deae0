"""Options from texts, from the environment and from defaults, and the errors for invalid ones."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path

import msgspec
import pytest

from elasticstate.core.ids import HostSlots, WorkerId
from elasticstate.core.policy import Policy
from elasticstate.core.types import MemberOptions
from elasticstate.driver.driver import job_spec
from elasticstate.errors import OptionError
from elasticstate.net import messages
from elasticstate.net.messages import Launch
from elasticstate.options import (
    COMMIT_DEVICE_MEMORY,
    Options,
    WorkerEnvironment,
    declarations,
    read_options,
    read_options_to_check,
    runtime_directory,
    usable_runtime_directory,
    worker_environment,
)
from elasticstate.options.kinds import parse_host

COMMAND = ["python", "train.py"]


def read(environ: dict[str, str] | None = None, **given: str) -> Options:
    return read_options({"np": "2", **given}, COMMAND, environ or {})


def test_what_is_not_given_has_the_default_of_the_contract() -> None:
    options = read()
    assert (options.np, options.min_np, options.max_np) == (2, 2, 2)
    assert options.heartbeat_timeout_s == 10
    assert options.hang_timeout_s is None
    assert options.cooldown_range_s == (10, 600)


def test_a_discovery_script_sets_no_limit_unless_one_is_given() -> None:
    assert read(host_discovery_script="x").max_np is None
    assert read(host_discovery_script="x", max_np="3").max_np == 3


def test_every_option_has_a_line_of_help_and_a_twin_for_each_long_name() -> None:
    for option in declarations().values():
        assert option.help
        assert option.help == option.help.strip()
        assert len(option.twins) == sum(name.startswith("--") for name in option.names) >= 1


@pytest.mark.parametrize("name", declarations())
def test_the_twin_of_an_option_is_read(name: str) -> None:
    samples = {
        "hosts": "a:3",
        "backend": "gloo",
        "cooldown_range_s": "1 2",
        "verbose": "yes",
    }
    samples |= {"verify_sync": "on", "env": "HF_TOKEN,NCCL_*"}
    samples |= {"horovod": "1", "tick_records": "on", "min_np": "1", "max_np": "7", "job_name": "j"}
    samples |= {"preemption_signals": "USR1,SIGTERM"}
    samples |= {"tee": "1", "debug_rank": "1", "only_ranks": "0,4-7", "preload": "json,os.path"}
    samples |= {"listen": "0.0.0.0:7000", "token_file": "f", "stall_shutdown_s": "90"}
    samples |= {
        "bind": "numa",
        "straggler_action": "drain",
        "divergence": "off",
        "one_copy_per_host": "1",
        "dashboard_require_token": "1",
    }
    text = samples.get(name, "6")
    given = {} if name == "np" else {"np": "2"}
    given |= {"pod_selector": {"listen": "[::1]", "token_file": "f"}}.get(name, {})
    given |= {"np": "6"} if name == "np_multiple" else {}
    given |= {"listen": {"token_file": "f"}, "token_file": {"listen": "[::1]"}, "tee": {"log_dir": "d"}}.get(name, {})
    values = [getattr(read_options(given, COMMAND, {twin: text}), name) for twin in declarations()[name].twins]
    plain = getattr(read_options({"np": "9"}, COMMAND, {}), name)
    assert all(value != plain for value in values)


def test_the_command_line_has_precedence_over_the_environment() -> None:
    assert read({"ELASTICSTATE_DRAIN_TIMEOUT": "7"}).drain_timeout_s == 7
    assert read({"ELASTICSTATE_DRAIN_TIMEOUT": "7"}, drain_timeout_s="3").drain_timeout_s == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"np": "5"}, "-np: 5: must be a multiple of --np-multiple, which is 4. Give 4 or 8."),
        ({"np": "8", "min_np": "2"}, "--min-np: 2: must be a multiple of --np-multiple, which is 4. Give 4."),
        ({"np": "8", "max_np": "9"}, "--max-np: 9: must be a multiple of --np-multiple, which is 4. Give 8 or 12."),
    ],
)
def test_numbers_of_workers_that_are_no_whole_groups_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_options({"np_multiple": "4", **given}, COMMAND, {})
    assert str(caught.value) == said


def test_numbers_of_workers_that_are_not_given_are_whole_groups() -> None:
    options = read_options({"np_multiple": "4", "hosts": "a:5,b:5"}, COMMAND, {})
    assert (options.np, options.min_np, options.max_np) == (8, 8, 8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("np", "0"),
        ("np", "two"),
        ("min_np", "-1"),
        ("hosts", "a:b"),
        ("hosts", "a,,b"),
        ("slots_per_host", "0"),
        ("backend", "tcp"),
        ("start_timeout_s", "nan"),
        ("start_timeout_s", "inf"),
        ("heartbeat_timeout_s", "0.1"),
        ("hang_timeout_s", "never"),
        ("reset_limit", "-1"),
        ("cooldown_range_s", "5"),
        ("cooldown_range_s", "5 1"),
        ("verbose", "maybe"),
        ("tee", "4"),
        ("only_ranks", "0,"),
        ("only_ranks", "4-2"),
        ("preemption_signals", "SIGINT"),
        ("preemption_signals", "TERM,CHLD"),
        ("preemption_signals", "9"),
        ("preemption_signals", "34"),
        ("preemption_signals", "0"),
        ("preemption_signals", "SIGRTMIN"),
        ("preemption_signals", "SIGFOO"),
        ("preemption_signals", ""),
        ("preemption_command", "'unclosed"),
        ("preemption_command", " "),
        ("job_name", "a/b"),
        ("job_name", ".."),
    ],
)
def test_a_bad_value_names_option_value_and_valid_values(name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(**{name: text})
    said = str(caught.value)
    option = declarations()[name]
    assert said == f"{'/'.join(option.names)}: {text!r}: must be {option.kind.valid}"
    assert "\n" not in said


def test_what_the_terminal_does_not_get_must_go_to_files() -> None:
    with pytest.raises(OptionError, match=r"^--tee: 1: must be 3 without --log-dir"):
        read(tee="1")
    assert read(tee="1", log_dir="d").tee == 1
    assert read(only_ranks="0,4-7").only_ranks == ((0, 0), (4, 7))


def test_a_bad_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(OptionError, match=r"^ELASTICSTATE_ORPHAN_TIMEOUT: 'x': must be a number of seconds"):
        read({"ELASTICSTATE_ORPHAN_TIMEOUT": "x"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_np": "3"}, "--min-np: 3: must be at most -np, which is 2. Lower --min-np, or raise -np."),
        ({"max_np": "1"}, "--max-np: 1: must be at least -np, which is 2. Raise --max-np, or lower -np."),
        ({"hosts": "a", "hostfile": "f"}, "--hosts and --hostfile exclude each other. Give only one of them."),
        (
            {"one_copy_per_host": "1", "backend": "mpi"},
            "--one-copy-per-host and --backend mpi: not tested together. Use --backend gloo or nccl, or leave "
            "--one-copy-per-host out.",
        ),
        (
            {"one_copy_per_host": "1", "divergence": "restore"},
            "--divergence restore and --one-copy-per-host exclude each other: workers that keep no commits are not "
            "compared. Use --divergence warn, or leave --one-copy-per-host out.",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(**given)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"np": "4", "hosts": "localhost:2"}, "the hosts have 2 slots, fewer than -np, which is 4"),
        ({"np": "4", "min_np": "3", "hosts": "a,b"}, "the hosts have 2 slots, fewer than --min-np, which is 3"),
        ({"np": "1", "hosts": "localhost:0"}, "the hosts have 0 slots, fewer than -np, which is 1"),
    ],
)
def test_hosts_that_can_never_be_enough_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(**given)
    assert str(caught.value).startswith(f"-H/--hosts: {said}. ")


def test_hosts_that_are_enough_for_min_np_or_may_become_enough_are_taken() -> None:
    assert read(np="4", min_np="2", hosts="a:1,b:1").min_np == 2
    assert read(np="4", hosts="a,b", slots_per_host="2").np == 4
    assert read(np="4", hostfile="f").np == read(np="4", host_discovery_script="s").np == 4


def test_signals_have_names_and_numbers() -> None:
    assert read().preemption_signals == (signal.SIGTERM,)
    assert read(preemption_signals="SIGTERM").preemption_signals == (signal.SIGTERM,)
    usual = (signal.SIGUSR1, signal.SIGTERM, signal.SIGXCPU)
    assert read(preemption_signals=f"usr1, {signal.SIGTERM:d},SIGXCPU,SIGUSR1").preemption_signals == usual


def test_bytes_have_units_and_reach_the_workers() -> None:
    assert [read(commit_device_memory=text).commit_device_memory for text in ("0", "4096", "3k", "512M", "2G")] == [
        0,
        4096,
        3 << 10,
        512 << 20,
        2 << 30,
    ]
    for text in ("", "M", "-1", "1.5G", "2GB"):
        with pytest.raises(
            OptionError, match=r"--commit-device-memory: .*: must be a number of bytes, for example 4096, 512M or 2G"
        ):
            read(commit_device_memory=text)
    told = dict(job_spec("job", "id", 1, read(commit_device_memory="1G")).environment)
    assert told[COMMIT_DEVICE_MEMORY] == str(1 << 30)


def test_a_signal_that_has_a_meaning_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"^--preemption-signals: 'SIGCHLD': must be names .*but none that .*SIGCHLD"):
        read(preemption_signals="SIGCHLD")


def test_without_np_each_slot_has_a_worker() -> None:
    cores = len(os.sched_getaffinity(0))
    for given, np, reason in (
        ({}, cores, "one for each core of this machine"),
        ({"slots_per_host": "3"}, 3, "one for each slot"),
        ({"hosts": "h1:4,h2"}, 5, "one for each slot of the hosts"),
        ({"hosts": "h1,h2", "slots_per_host": "3"}, 6, "one for each slot of the hosts"),
        ({"np": "2"}, 2, ""),
    ):
        options = read_options(given, COMMAND, {})
        assert (options.np, options.min_np, options.max_np, options.reason_of_np) == (np, np, np, reason)


@pytest.mark.parametrize(
    "given",
    [
        {"hostfile": "f"},
        {"hosts": "h1,h2", "slots_per_host": "auto"},
        {"host_discovery_script": "s"},
        {"discovery": "ray"},
    ],
)
def test_np_is_needed_where_only_the_driver_knows_the_slots(given: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="-np/--num-proc is missing"):
        read_options(given, COMMAND, {})


def test_the_command_is_needed() -> None:
    with pytest.raises(OptionError, match="COMMAND is missing"):
        read_options({"np": "2"}, [], {})


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ({}, {"collective_timeout_s": 1800, "connect_timeout_s": 10, "failure_grace_s": 2, "hold_timeout_s": 2}),
        ({}, {"discovery_timeout_s": 10, "preemption_cooldown_s": 600, "max_no_progress": 3}),
        ({"collective_timeout_s": "60"}, {"collective_timeout_s": 60}),
        ({"heartbeat_timeout_s": "2"}, {"connect_timeout_s": 2, "failure_grace_s": 0.4}),
        ({"heartbeat_timeout_s": "60"}, {"connect_timeout_s": 60, "failure_grace_s": 2}),
        ({"drain_timeout_s": "1"}, {"hold_timeout_s": 1}),
        ({"discovery_interval_s": "60"}, {"discovery_timeout_s": 60}),
        ({"cooldown_range_s": "1 20"}, {"preemption_cooldown_s": 20}),
        ({"reset_limit": "0"}, {"max_no_progress": 3}),
        ({"reset_limit": "9"}, {"max_no_progress": 10}),
    ],
)
def test_values_that_follow_from_options(given: dict[str, str], follows: dict[str, float]) -> None:
    options = read(**given)
    assert {name: getattr(options, name) for name in follows} == follows


def test_a_python_file_runs_with_this_python_unbuffered() -> None:
    assert read_options({"np": "1"}, ["train.py", "--x"], {}).command == (sys.executable, "-u", "train.py", "--x")


def test_the_policy_is_made_of_the_options() -> None:
    options = read(min_np="1", max_np="4", reset_limit="2", collective_timeout_s="9", cooldown_range_s="1 2")
    policy = options.policy()
    names = {each.name for each in fields(Policy)} - NO_OPTIONS
    assert {name: getattr(policy, name) for name in names} == {name: getattr(options, name) for name in names}
    assert (policy.np, policy.min_np, policy.max_np, policy.cooldown_range_s) == (2, 1, 4, (1.0, 2.0))


NO_OPTIONS = {"preemption_window_s", "straggler_threshold", "waiting_notice_s", "no_tick_notice_s"}


def test_only_the_options_declare_defaults() -> None:
    """The notice times are no options. The sizes of buffers and the like are no options, either."""
    assert {each.name for each in fields(Policy) if each.default is not MISSING} == {*NO_OPTIONS, "hold_timeout_s"}
    names = {each.name for each in fields(Options)}
    carriers = (messages.JobSpec, MemberOptions, Launch)
    carried = [(f.name, f.default) for kind in carriers for f in msgspec.structs.fields(kind) if f.name in names]
    carried += [(f.name, f.default) for f in fields(WorkerEnvironment) if f.name in names]
    assert carried
    assert [name for name, default in carried if default not in (msgspec.NODEFAULT, MISSING)] == []


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", HostSlots("a", 1)),
        (" a:4 ", HostSlots("a", 4)),
        ("127.0.0.2:0", HostSlots("127.0.0.2", 0)),
        ("node-1.x slots=8", HostSlots("node-1.x", 8)),
        ("n slots = 8", HostSlots("n", 8)),
        ("n:2 rack=r-1", HostSlots("n", 2, "r-1")),
        ("n rack = 7", HostSlots("n", 1, "7")),
        ("n slots=8  rack=eu.1", HostSlots("n", 8, "eu.1")),
        ("n rack=a slots=8", HostSlots("n", 8, "a")),
        ("[fd00:0::1]:4 rack=a", HostSlots("fd00::1", 4, "a")),
    ],
)
def test_hosts_are_read(text: str, host: HostSlots) -> None:
    assert parse_host(text, 1) == host


@pytest.mark.parametrize("text", ["", ":4", "a:", "a:-1", "a:4:5", "a b", "$(x)", "fd00::1", "[fe80::1%eth0]"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host: must be host or host:slots"):
        parse_host(text, 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a:4 zone=b", "'a:4 zone=b': unknown attribute 'zone': must be slots=N or rack=NAME"),
        ("a max_slots=4", "'a max_slots=4': unknown attribute 'max_slots': must be slots=N or rack=NAME"),
        (
            "a rack=",
            "'a rack=': rack=: must be letters, digits, dots, dashes and underscores, and not begin with a dot",
        ),
        ("a rack=b/c", "'a rack=b/c': rack=b/c: must be letters, .*"),
        ("a rack=b rack=c", "'a rack=b rack=c': rack=c: must be one rack=, with a value"),
        ("a:4 slots=4", "'a:4 slots=4': slots=4: must be one slots=, with a value"),
        ("a slots=x", "'a slots=x': slots=x: must be one slots=, with a value"),
    ],
)
def test_an_attribute_of_a_host_that_is_unknown_or_wrong_is_named(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        parse_host(text, 1)


def test_hosts_of_the_command_line_have_racks() -> None:
    hosts = read_options({"np": "3", "hosts": "a:2 rack=x, b rack=y"}, ["true"], {}).hosts
    assert hosts == ("a:2 rack=x", "b rack=y")
    with pytest.raises(
        OptionError, match=r"^-H/--hosts: 'a zone=b': must be host or host:slots, perhaps with rack=NAME"
    ):
        read_options({"np": "1", "hosts": "a zone=b"}, ["true"], {})


def test_a_worker_reads_what_its_agent_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    told = WorkerEnvironment(
        "/s", "/mark", WorkerId("127.0.0.2", 1, 3), "job", "c0ffee", "127.0.0.2", "/dev/shm/x/1", (10, 15), "gloo", 4096
    )
    for name, value in told.variables().items():
        monkeypatch.setenv(name, value)
    assert worker_environment() == told
    monkeypatch.setenv("ELASTICSTATE_WORKER", "x")
    with pytest.raises(OptionError, match="other variables of a worker are missing or invalid"):
        worker_environment()
    monkeypatch.delenv("ELASTICSTATE_SOCKET")
    assert worker_environment() is None


WORKER = WorkerEnvironment(
    "socket", "mark", WorkerId("localhost", 0, 1), "job", "id", "127.0.0.1", "commits", (15,), "gloo"
)


def test_the_record_of_a_job_is_kept_where_only_the_user_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == usable_runtime_directory() == tmp_path


@pytest.mark.parametrize("is_set", [True, False])
def test_a_runtime_directory_that_is_missing_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_set: bool
) -> None:
    missing = tmp_path / "1000"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(missing))
    said = rf"^XDG_RUNTIME_DIR: '{missing}': there is no such directory\. .* unset it to use {tempfile.gettempdir()}\.$"
    if not is_set:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr(tempfile, "tempdir", str(missing))
        said = rf"^the directory for temporary files, '{missing}': there is no such directory\. Set TMPDIR"
    with pytest.raises(OptionError, match=said):
        usable_runtime_directory()


def test_what_is_to_be_checked_needs_no_job() -> None:
    options, given = read_options_to_check({"backend": "mpi"}, {"ELASTICSTATE_COMMIT_DIR": "/x"})
    assert (options.backend, options.commit_dir, options.np) == ("mpi", "/x", 1)
    assert given == {"backend", "commit_dir"}


def test_what_contradicts_itself_cannot_be_checked() -> None:
    with pytest.raises(OptionError, match="Give only one of them"):
        read_options_to_check({"hosts": "a:1", "hostfile": "f"}, {})


@pytest.mark.parametrize("text", ["off", "0"])
def test_the_stall_check_can_be_switched_off(text: str) -> None:
    assert read().stall_check_s == 60
    assert read(stall_check_s=text).stall_check_s is None
    assert read(stall_shutdown_s=text).stall_shutdown_s is None


def test_horovods_variables_set_the_stall_check() -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}
    options = read(times)
    assert (options.stall_check_s, options.stall_shutdown_s) == (30, 90)
    assert read({**times, "HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_check_s is None
    assert read({**times, "HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_check_s == 30
    assert read({**times, "ELASTICSTATE_STALL_CHECK_TIME": "20"}).stall_check_s == 20
    assert read({**times, "HOROVOD_STALL_CHECK_DISABLE": "1"}, stall_check_s="10").stall_check_s == 10
    with pytest.raises(OptionError, match=r"^HOROVOD_STALL_CHECK_TIME_SECONDS: 'x': must be a number of seconds"):
        read({"HOROVOD_STALL_CHECK_TIME_SECONDS": "x"})


def test_workers_get_the_absolute_path_of_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert read().timeline_variables() == {}
    given = read({"HOROVOD_TIMELINE": "trace", "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    assert given.timeline_variables() == {"HOROVOD_TIMELINE": "/tmp/trace", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    dynamic = read({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline_variables()
    assert dynamic == {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_TIMELINE_MARK_CYCLES": "0"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"lease_s": "8", "elastic_timeout_s": "9"},
            "--lease: 8: must be at most 7.2, as --elastic-timeout is 9: the others wait 1.25 times the lease",
        ),
        (
            {"hostfile": "f", "discovery_interval_s": "90", "elastic_timeout_s": "60"},
            "--discovery-interval: 90: must be at most --elastic-timeout, which is 60",
        ),
        (
            {"host_discovery_script": "x", "discovery_interval_s": "90", "start_timeout_s": "60"},
            "--discovery-interval: 90: must be at most --start-timeout, which is 60",
        ),
    ],
)
def test_times_that_contradict_each_other_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read(**given)
    with pytest.raises(OptionError, match=message):
        read({f"ELASTICSTATE_{name.removesuffix('_s').upper()}": value for name, value in given.items()})


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ({"lease_s": "800"}, {"elastic_timeout_s": 1000}),
        ({"elastic_timeout_s": "1"}, {"lease_s": None}),
        ({"hostfile": "f", "discovery_interval_s": "900"}, {"elastic_timeout_s": 900, "start_timeout_s": 900}),
        ({"hostfile": "f", "discovery_interval_s": "900", "lease_s": "800"}, {"elastic_timeout_s": 1000}),
        ({"hosts": "a:2", "discovery_interval_s": "90", "elastic_timeout_s": "60"}, {"elastic_timeout_s": 60}),
        ({"hostfile": "f", "elastic_timeout_s": "0.5"}, {"discovery_interval_s": None}),
    ],
)
def test_the_default_of_a_time_follows_the_other_one(given: dict[str, str], follows: dict[str, float]) -> None:
    options = read(**given)
    assert {name: getattr(options, name) for name in follows} == follows


@pytest.mark.parametrize("text", ["0", "0.1", "1", "10", "99999"])
@pytest.mark.parametrize("name", [name for name in declarations() if name.endswith("_s")])
def test_no_time_is_refused_because_of_the_default_of_another_one(name: str, text: str) -> None:
    """The message of the only exception names both."""
    try:
        declarations()[name].kind.parse(text)
    except ValueError:
        return
    if (name, text) in (("stall_shutdown_s", "1"), ("stall_shutdown_s", "10")):
        with pytest.raises(OptionError, match="must be at least --stall-check-time, which is 60"):
            read(**{name: text})
    else:
        read(**{name: text}, **({"hostfile": "f"} if name == "discovery_interval_s" else {}))


def test_a_stall_cannot_end_the_job_before_it_is_reported() -> None:
    with pytest.raises(
        OptionError, match="--stall-shutdown-time: 30: must be at least --stall-check-time, which is 60"
    ):
        read(stall_shutdown_s="30")
    assert read(stall_shutdown_s="30", stall_check_s="off").stall_shutdown_s == 30
