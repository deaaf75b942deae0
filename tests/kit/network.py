"""Simulated hosts: network namespaces on one bridge, with faults of hosts and links.

Each host has an address, a name, a shared memory and an ssh server of its own, whose agents fork as those of this
machine do (kit/forks). Needs root, ``ip``, ``unshare``, ``nsenter``, ``sshd`` and ``iptables``: ``missing()`` names
what is not available.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.kit import forks
from tests.kit.forks.over_ssh import SshForks

_NEEDED = ("ip", "unshare", "nsenter", "sshd", "ssh-keygen", "iptables")
_SHELL_FILE = Path.home() / ".bashrc"  # bash also reads it for commands over ssh
_NETS = {4: ("10.91.7.{}", 24), 6: ("fd91::{}", 64)}


def missing() -> str:
    """Return the reason why such hosts are impossible here; "" if they are possible."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    os.environ["PATH"] += os.pathsep + "/usr/sbin:/sbin"
    absent = [program for program in _NEEDED if shutil.which(program) is None]
    return f"needs {', '.join(absent)} (Debian: iproute2 util-linux openssh-server iptables)" if absent else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class _Namespaces:
    """A process whose only purpose is to keep its namespaces alive."""

    def __init__(self, *kinds: str) -> None:
        self._process = subprocess.Popen(["unshare", *(f"--{kind}" for kind in kinds), "sleep", "infinity"])
        self.pid = self._process.pid
        own = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + 10
        while not _is_in(self.pid, lambda: os.stat(f"/proc/{self.pid}/ns/net").st_ino != own) or "sleep" not in _comm(
            self.pid
        ):
            assert time.monotonic() < deadline, "no namespaces within 10 s"
            time.sleep(0.005)
        self.inode = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--", *command]

    def run(self, *command: str) -> None:
        _run(*self.enter(*command))

    def kill(self) -> None:
        """Send SIGKILL to all processes in the namespaces."""
        while others := [p for p in psutil.pids() if p != self.pid and self._has(p)]:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self._process.kill()
        self._process.wait()

    def pids(self) -> list[int]:
        """Return all processes in the namespaces."""
        return [pid for pid in psutil.pids() if pid != self.pid and self._has(pid)]

    def lines(self) -> list[str]:
        """Return the command lines of all processes in the namespaces."""
        found = []
        for pid in psutil.pids():
            with suppress(psutil.Error):
                if pid != self.pid and self._has(pid):
                    found.append(" ".join(psutil.Process(pid).cmdline()))
        return found

    def _has(self, pid: int) -> bool:
        with suppress(OSError, psutil.Error):
            is_here = os.stat(f"/proc/{pid}/ns/net").st_ino == self.inode
            return is_here and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False


def _is_in(pid: int, look: object) -> bool:
    with suppress(OSError):
        return bool(look())  # type: ignore[operator]
    return False


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


class Host:
    """One machine. Call ``power_on`` first."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = _NETS[network.family][0].format(number)
        self._network = network
        self._port = f"port{number}"
        self._number = number
        self._storage: _Namespaces | None = None
        self._dropped = 0  # packets, when it last lost power
        self._sshd: subprocess.Popen[bytes] | None = None

    @property
    def has_power(self) -> bool:
        return self._storage is not None

    @property
    def storage(self) -> _Namespaces:
        assert self._storage is not None, f"{self.name} has no power"
        return self._storage

    def power_on(self, ssh: bool = True) -> None:
        """Start the host, with a new, empty shared memory."""
        storage = self._storage = _Namespaces("net", "mount", "uts")
        self._network.namespaces.add(storage.inode)
        switch, number = self._network.switch, self._number
        with suppress(AssertionError):  # the kernel takes time to remove the link of the last run
            switch.run("ip", "link", "delete", self._port)
        peer = ("peer", "name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", str(storage.pid))
        switch.run("ip", "link", "add", self._port, "type", "veth", *peer)
        switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
        storage.run("ip", "link", "set", "lo", "up")
        self.add_address("eth0", f"{self.address}/{_NETS[self._network.family][1]}")
        storage.run("ip", "link", "set", "eth0", "up")
        storage.run("hostname", self.name)
        storage.run("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm")
        if self._network.are_machines:
            storage.run("mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", os.environ["XDG_RUNTIME_DIR"])
        storage.run("mount", "--bind", str(self._network.etc / "hosts"), "/etc/hosts")
        storage.run("mount", "--bind", str(self._network.etc / "ssh"), "/etc/ssh")
        if _SHELL_FILE.exists():  # programs that it starts, like pyenv, may hang for a minute after a kill
            storage.run("mount", "--bind", "/dev/null", str(_SHELL_FILE))
        if ssh:
            Path("/run/sshd").mkdir(exist_ok=True)
            log = self._network.directory / f"sshd-{self.name}"
            self._sshd = subprocess.Popen([*storage.enter("/usr/sbin/sshd", "-D", "-E", str(log))])
            self._wait_for_sshd()

    def add_address(self, interface: str, address: str) -> None:
        """Add an address, as ``address/bits``. One of IPv6 can be used at once."""
        options = ("nodad",) if ":" in address else ()
        self.storage.run("ip", "address", "add", address, "dev", interface, *options)

    def add_interface(self, name: str, address: str, has_link: bool = True) -> None:
        """Add an interface to the same switch. One without a link gets the default route."""
        end = f"{self._port}-{name}"
        self._network.switch.run(
            *("ip", "link", "add", end, "type", "veth", "peer", "name", name, "netns", str(self.storage.pid))
        )
        self._network.switch.run("ip", "link", "set", end, "master", "bridge", "up" if has_link else "down")
        self.storage.run("ip", "link", "set", name, "up")
        self.add_address(name, address)
        if not has_link:
            self.storage.run("ip", "route", "add", "default", "dev", name)

    def resolve_only(self, *lines: str, server: str = "") -> None:
        """Replace the host's /etc/hosts by these lines, and let it use this name server alone."""
        servers = f"nameserver {server}\n" if server else ""
        for name, text in (("hosts", "".join(f"{line}\n" for line in lines)), ("resolv.conf", servers)):
            path = self._network.directory / f"{name}-{self.name}"
            path.write_text(text)
            self.storage.run("mount", "--bind", str(path), f"/etc/{name}")

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 10
        table = f"/proc/{self.storage.pid}/net/tcp{'6' if self._network.family == 6 else ''}"
        while b":0016 " not in Path(table).read_bytes():  # port 22
            assert time.monotonic() < deadline, "no sshd within 10 s"
            time.sleep(0.01)

    def power_off(self) -> None:
        """Cut the link and kill all processes: no FIN and no RST leaves the host."""
        if self.has_power:
            self._dropped = self.dropped()
        self.cut()
        self.stop()

    def stop(self) -> None:
        """Kill all processes. Their sockets can still send FIN and RST."""
        if self._storage is not None:
            storage, self._storage = self._storage, None
            storage.kill()
        if self._sshd is not None:
            self._sshd.wait()
            self._sshd = None

    def processes(self) -> list[str]:
        """Return the command lines of all elasticstate processes on the host."""
        return [] if self._storage is None else [line for line in self._storage.lines() if "elasticstate" in line]

    def cut(self) -> None:
        """Cut the link, as if the cable were pulled."""
        self._network.switch.run("ip", "link", "set", self._port, "down")

    def is_cut(self) -> bool:
        command = self._network.switch.enter("ip", "-o", "link", "show", self._port)
        return " state DOWN " in subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def heal(self) -> None:
        self._network.switch.run("ip", "link", "set", self._port, "up")

    @property
    def _tables(self) -> str:
        return "ip6tables" if self._network.family == 6 else "iptables"

    def _filter(self, *rule: str) -> None:
        self.storage.run(self._tables, *rule)

    def mute(self) -> None:
        """Drop all packets that leave the host. Packets to the host still arrive."""
        self._filter("-A", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def deafen(self) -> None:
        """Drop all packets to the host."""
        self._filter("-A", "INPUT", "-i", "eth0", "-j", "DROP")

    def deafen_to(self, other: Host) -> None:
        """Drop all packets from the other host."""
        self._filter("-A", "INPUT", "-i", "eth0", "-s", other.address, "-j", "DROP")

    def part_from(self, other: Host) -> None:
        """Drop all packets between the two hosts, in both directions. Both still reach all other hosts."""
        self.deafen_to(other)
        self._filter("-A", "OUTPUT", "-o", "eth0", "-d", other.address, "-j", "DROP")

    def lose(self, share: float) -> None:
        """Drop a random share of the packets to the host."""
        rule = ("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        self._filter("-A", "INPUT", "-i", "eth0", *rule)

    def dropped(self) -> int:
        """Return the number of packets dropped by rules so far, as proof that a fault took effect: until it lost its
        power, if it has none."""
        if not self.has_power:
            return self._dropped
        command = self.storage.enter(self._tables, "-L", "-v", "-x", "-n")
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(int(line.split()[0]) for line in text.splitlines() if " DROP " in line)

    def mend(self) -> None:
        """Remove all rules. They end with the power, too."""
        if self.has_power:
            self._filter("-F")


class Network:
    """The driver's host ``d`` and others. Use it as a context manager; it removes everything at the end.

    ``new_processes``: agents that ssh starts are new processes, as at users, instead of forks.
    ``are_machines``: each host has a runtime directory of its own. ``family``: of all addresses, IPv 4 or 6.
    """

    def __init__(
        self, directory: Path, *names: str, new_processes: bool = False, are_machines: bool = False, family: int = 4
    ) -> None:
        self.are_machines = are_machines
        self.family = family
        self.directory = directory / "network"
        self.etc = self.directory / "etc"
        (self.etc / "ssh").mkdir(parents=True)
        self.namespaces: set[int] = set()  # of all hosts so far, also of removed ones
        self.hosts = {name: Host(self, name, number) for number, name in enumerate(("d", *names), start=1)}
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts.values())]
        (self.etc / "hosts").write_text("\n".join(lines) + "\n")
        self._forks = None if new_processes else SshForks()
        self._write_ssh()

    def _write_ssh(self) -> None:
        ssh = self.etc / "ssh"
        for key in ("ssh_host_ed25519_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key))
        public = (ssh / "ssh_host_ed25519_key.pub").read_text()
        (ssh / "known_hosts").write_text("".join(f"{h.name},{h.address} {public}" for h in self.hosts.values()))
        shutil.copy(ssh / "user_key.pub", ssh / "authorized_keys")
        (ssh / "ssh_config").write_text(
            "GlobalKnownHostsFile /etc/ssh/known_hosts\nUserKnownHostsFile /dev/null\nIdentityFile /etc/ssh/user_key\n"
        )
        variables, command = dict(os.environ), ""
        if self._forks is not None:
            variables, command = forks.environment(), f"ForceCommand {self._forks.command}\n"
        names = ("PYTHONPATH", "XDG_RUNTIME_DIR", "ELASTICSTATE_TEST_RUN", "OMP_NUM_THREADS")
        passed = " ".join(f'"{name}={variables[name]}"' for name in names if name in variables)
        (ssh / "sshd_config").write_text(
            "HostKey /etc/ssh/ssh_host_ed25519_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\nStrictModes no\n"
            f"PermitRootLogin yes\nUsePAM no\nPidFile none\nLogLevel VERBOSE\nSetEnv {passed}\n{command}"
        )

    def __enter__(self) -> Network:
        self.switch = _Namespaces("net")
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        self.switch.run("ip", "link", "set", "bridge", "up")
        for host in self.hosts.values():
            host.power_on(ssh=host.name != "d")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._wait_until_nothing_runs()
        finally:
            for host in self.hosts.values():
                host.stop()
            self.switch.kill()
            if self._forks is not None:
                self._forks.close()

    def _wait_until_nothing_runs(self) -> None:
        """Wait for the end of all agents after the job: unwanted or unreachable agents exit by themselves."""
        deadline = time.monotonic() + 30
        while left := [f"{host.name}: {line}" for host in self.hosts.values() for line in host.processes()]:
            assert time.monotonic() < deadline, f"left on the hosts: {left}"
            time.sleep(0.02)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def python(self, name: str, *arguments: str) -> Sequence[str]:
        """Return a command that runs this Python on a host."""
        return self[name].storage.enter(sys.executable, *arguments)
