"""Hosts whose names do not resolve or resolve to a wrong address, with IPv6 alone, or with several interfaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kit.hosts import PORT, QUICK, agent, check_no_two_worlds, ends_well, trains_with
from tests.kit.job import Job
from tests.kit.network import Host, Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NET = r"10\.91\.7\.\d"
SCRIPTS = Path(__file__).parent / "scripts"
NAMES = {"debian": ("127.0.1.1 d a b c",), "an old lease": ("10.91.7.77 d a b c",)}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", "c") as network:
        yield network


@pytest.fixture
def ipv6(tmp_path: Path) -> Iterator[Network]:
    with Network(tmp_path, "a", "b", are_machines=True, family=6) as network:
        yield network


def forget_names(network: Network, *lines: str, server: str = "") -> None:
    for host in network.hosts.values():
        host.resolve_only(*lines, server=server)


def start(network: Network, tmp_path: Path, *options: str, **more: object) -> Job:
    within = network["d"].storage.enter()
    script = {"until": tmp_path / "stop", "steps": 10} if "command" not in more else {}
    return Job(tmp_path, "-np", "2", "--min-np", "2", *options, *QUICK, within=within, **script, **more)


@contextmanager
def dial_in(
    network: Network,
    tmp_path: Path,
    *joins: tuple[str, str],
    listen: str = "0.0.0.0",
    options: tuple[str, ...] = (),
    **more: object,
) -> Iterator[Job]:
    """Run a job on agents that dial in. ``joins``: hosts, each with the address at which its agent finds the driver."""
    token = tmp_path / "token"
    with ExitStack() as stack:
        options = ("--listen", f"{listen}:{PORT}", "--token-file", str(token), *options)
        job = stack.enter_context(start(network, tmp_path, *options, **more))
        job.wait_for("token file", token.exists)
        agents = []
        for host, address in joins:
            at = f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"
            agents.append(stack.enter_context(agent(network, host, token, "--slots", "1", "--join", at)))
            job.wait_for_event("agent_joined", len(agents))  # so that the ranks have the order of the hosts
        yield job
        for process in agents:
            process.wait(30)


def survives_a_kill(job: Job, size: int) -> None:
    """Kill the worker with the highest rank, and wait until another one has taken its place."""
    trains_with(job, size)
    os.kill(job.pid_of(size - 1), signal.SIGKILL)
    job.wait_for_event("worker_exited", signal=signal.SIGKILL)
    trains_with(job, size, count=2)


# -------------------------------------------------------------------------------------------------- names do not matter


@pytest.mark.parametrize("lines", NAMES.values(), ids=NAMES)
def test_names_of_hosts_do_not_matter(network: Network, tmp_path: Path, lines: tuple[str, ...]) -> None:
    forget_names(network, *lines)
    driver = network["d"].address
    with dial_in(network, tmp_path, ("a", driver), ("b", driver)) as job:
        trains_with(job, 2)
        ends_well(job)
    assert job.events("worker_ended") == [] or all(e["exit_code"] == 0 for e in job.events("worker_ended"))


@pytest.mark.parametrize("answers", ["nothing", "names that do not resolve"])
def test_a_job_without_names_survives(network: Network, tmp_path: Path, answers: str) -> None:
    """No host has a file of names. The name server does not answer, or has reverse names alone."""
    server = network["c"]
    forget_names(network, server=server.address)
    with ExitStack() as stack:
        asked = tmp_path / "asked"
        program = [str(SCRIPTS / "name_server.py"), str(asked), *(["ghost.invalid"] if answers != "nothing" else [])]
        process = stack.enter_context(subprocess.Popen(network.python("c", "-I", "-S", *program)))
        stack.callback(process.kill)
        driver = network["d"].address
        job = stack.enter_context(dial_in(network, tmp_path, ("a", driver), ("b", driver)))
        survives_a_kill(job, 2)
        ends_well(job)
        assert not asked.exists(), asked.read_text()


def test_hosts_of_ssh_may_be_addresses_and_one_of_them_the_driver_s_own(network: Network, tmp_path: Path) -> None:
    forget_names(network, "127.0.1.1 d a b c")
    network["d"].storage.run("ip", "address", "add", "10.50.0.1/32", "dev", "lo")  # the first, and nobody reaches it
    hosts = f"{network['d'].address}:1,{network['a'].address}:1"
    with start(network, tmp_path, "-H", hosts) as job:
        trains_with(job, 2)
        ends_well(job)
    assert {event["host"] for event in job.events("worker_started")} == {network["d"].address, network["a"].address}


def test_an_agent_on_the_driver_s_host_may_dial_in_over_the_loopback_interface(
    network: Network, tmp_path: Path
) -> None:
    forget_names(network)
    with dial_in(network, tmp_path, ("d", "127.0.0.1"), ("a", network["d"].address)) as job:
        trains_with(job, 2)
        ends_well(job)


def test_the_address_need_not_be_the_first_of_its_interface(network: Network, tmp_path: Path) -> None:
    forget_names(network)
    for number, name in enumerate("dabc", start=1):
        run = network[name].storage.run
        run("ip", "address", "flush", "dev", "eth0")
        run("ip", "address", "add", f"10.60.{number}.1/24", "dev", "eth0")  # the others know no route to it
        run("ip", "address", "add", f"{network[name].address}/24", "dev", "eth0")
    driver = network["d"].address
    with dial_in(network, tmp_path, ("a", driver), ("b", driver)) as job:
        trains_with(job, 2)
        ends_well(job)


def test_plain_scripts_need_no_names_either(
    network: Network, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    forget_names(network, "127.0.1.1 d a b c")
    driver, command = network["d"].address, [sys.executable, str(SCRIPTS / "two_groups.py")]
    with dial_in(network, tmp_path, ("a", driver), ("b", driver), command=command) as job:
        job.finish()
    assert capfd.readouterr().out.count("sum 4 of 2") == 2


# ----------------------------------------------------------------------------------------------------------- interfaces


def test_an_interface_without_a_link_is_not_used(network: Network, tmp_path: Path) -> None:
    """The default route leads to it. The agent beside the driver does not learn from its connection who it is."""
    forget_names(network)
    for number, name in enumerate("dab", start=1):
        network[name].add_interface("eth1", f"10.92.{number}.1/24", has_link=False)
    driver = network["d"].address
    options = ("-np", "3", "--min-np", "2")
    with dial_in(network, tmp_path, ("d", "127.0.0.1"), ("a", driver), ("b", driver), options=options) as job:
        survives_a_kill(job, 3)
        ends_well(job)


def test_the_named_interface_is_used_for_everything(network: Network, tmp_path: Path) -> None:
    """Both hosts lack the first one, and the second one has no link."""
    for number, name in enumerate("ab", start=1):
        network[name].add_interface("fast", f"10.92.7.{number}/24")
    network["b"].add_interface("eth1", "10.92.8.1/24", has_link=False)
    network["a"].part_from(network["b"])  # over eth0
    driver, options = network["d"].address, ("--network-interface", "ib0,eth1,fast")
    with dial_in(network, tmp_path, ("a", driver), ("b", driver), options=options) as job:
        survives_a_kill(job, 2)
        ends_well(job)
    assert network["a"].dropped() == 0


def test_a_host_without_the_named_interface_is_named_with_those_that_it_has(network: Network, tmp_path: Path) -> None:
    token, driver = tmp_path / "token", network["d"].address
    options = ("--network-interface", "fast", "--listen", f"0.0.0.0:{PORT}", "--token-file", str(token))
    with start(network, tmp_path, *options) as job:
        job.wait_for("token file", token.exists)
        with agent(network, "b", token, "--slots", "1", "--join", f"{driver}:{PORT}") as process:
            assert process.wait(30) == 1
        job.wait_for("a warning", lambda: "only eth0, lo." in job.output)
    why = "could not start: --network-interface: 'fast': this host has no network interface 'fast', only eth0, lo. "
    assert why in job.output


# ----------------------------------------------------------------------------------------------------------- IPv6 alone


def test_a_job_with_ipv6_alone_survives_a_worker_and_the_driver_s_host(ipv6: Network, tmp_path: Path) -> None:
    options = ("-np", "3", "--min-np", "2", "-H", "d:1,[fd91::2]:1,b:1", "--standbys", "1", "--job-name", "six")
    with start(ipv6, tmp_path, *options) as job:
        survives_a_kill(job, 3)
        job.wait_for("a standby", lambda: any(event["standbys"] for event in job.events("record_kept")))
        ipv6["d"].power_off()
        job.wait_for_while_gone("a new driver", lambda: job.events("driver_restarted"))
        (restarted,) = job.events("driver_restarted")
        assert (restarted["back"], restarted["lost"]) == (["b", "fd91::2"], ["d"])
        steps = max(line["step"] for line in job.log("commit"))
        job.wait_for_while_gone("more ticks", lambda: max(c["step"] for c in job.log("commit")) > steps + 20)
        job.stop_file.touch()
        job.wait_for_while_gone("the end of the job", lambda: job.events("job_finished"))
        job.wait_for_while_gone("no process", lambda: not any(ipv6[name].processes() for name in "ab"))
        job.check_survival()
        check_no_two_worlds(job)


def test_plain_scripts_on_agents_that_dial_in_with_ipv6_alone(
    ipv6: Network, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    forget_names(ipv6)
    driver, command = ipv6["d"].address, [sys.executable, str(SCRIPTS / "two_groups.py")]
    with dial_in(ipv6, tmp_path, ("a", driver), ("b", driver), listen="[::]", command=command) as job:
        job.finish()
    assert capfd.readouterr().out.count("sum 4 of 2") == 2


# --------------------------------------------------------------------------------------------------------------- errors


def root_cause(job: Job, status: int = 1) -> str:
    """Wait for the end of a job that fails. Return the line with its root cause."""
    job.finish(status)
    (line,) = [line for line in job.output.splitlines() if "root cause" in line]
    return line


@pytest.mark.long  # unit/worker/test_addresses.py has the error
def test_an_interface_that_does_not_exist_is_named_at_once(network: Network, tmp_path: Path) -> None:
    with start(network, tmp_path, "-H", "a:1,b:1", before=["env", "GLOO_SOCKET_IFNAME=eth7"]) as job:
        assert "every worker failed before the first world" in root_cause(job, 3)
    assert "GLOO_SOCKET_IFNAME=eth7: this host has no network interface 'eth7', only eth0, lo." in job.output
    assert job.events("world_formed") == []


@pytest.mark.long  # what a firewall does to Gloo is named in the same way
def test_an_interface_that_reaches_no_other_host_is_named_with_both_hosts(network: Network, tmp_path: Path) -> None:
    forget_names(network)
    driver = network["d"].address
    with dial_in(network, tmp_path, ("a", driver), ("b", driver), before=["env", "GLOO_SOCKET_IFNAME=lo"]) as job:
        cause = root_cause(job, 3)
    assert re.search(
        rf"Gloo of [ab]:0#\d+ at {NET} cannot connect to [ab]:0#\d+ \(rank [01]\) at 127.0.0.1, "
        r"port \d+: Connection refused. A loopback address reaches no other host. .* set GLOO_SOCKET_IFNAME on",
        cause,
    ), cause


def test_a_firewall_between_two_hosts_is_named_with_both(network: Network, tmp_path: Path) -> None:
    forget_names(network)
    driver = network["d"].address
    refuse(network["b"], network["c"])
    refuse(network["c"], network["b"])
    options = ("-np", "3", "--min-np", "3", "--elastic-timeout", "5")
    with dial_in(network, tmp_path, *((name, driver) for name in "abc"), options=options) as job:
        cause = root_cause(job)
    assert re.search("host b gets no answer from host c|host c gets no answer from host b", cause), cause
    assert "Let TCP connections between the hosts pass to all ports" in cause


def test_a_firewall_before_the_store_is_named_with_the_address(network: Network, tmp_path: Path) -> None:
    forget_names(network)
    driver = network["d"].address
    refuse(network["a"], network["b"])
    refuse(network["b"], network["a"])
    options = ("--elastic-timeout", "5")
    with dial_in(network, tmp_path, ("a", driver), ("b", driver), options=options) as job:
        cause = root_cause(job)
    assert re.search("host a gets no answer from host b|host b gets no answer from host a", cause), cause
    assert "Let TCP connections between the hosts pass to all ports" in cause


def refuse(host: Host, other: Host) -> None:
    """Let the host refuse new connections from the other one."""
    reject = ("-j", "REJECT", "--reject-with", "tcp-reset")
    host.storage.run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-s", other.address, *reject)
