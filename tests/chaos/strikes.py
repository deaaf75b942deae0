"""Implementation of each kind of fault on real hosts: begin, proof that it took effect, and repair."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from elasticstate.agent.supervisor import sealed_commits
from elasticstate.commits import owner_of
from elasticstate.core.ids import CommitId
from tests.chaos.plan import KINDS, Fault
from tests.kit.job import Hosts, Job
from tests.kit.network import Host, Network
from tests.kit.pages import page_at

NOTHING = CommitId(0, 0)  # older than every commit
SCRIPT = Path(__file__).parent / "train.py"


class NobodyThere(Exception):
    """The target of the fault does not exist at the moment."""


@dataclass
class Strike:
    """A fault that is under way. ``proof`` returns True if the fault took effect; ``mend`` ends the fault."""

    fault: Fault
    proof: Callable[[], bool]
    mend: Callable[[], None] | None = None
    is_proved: bool = False

    def look(self) -> bool:
        self.is_proved = self.is_proved or self.proof()
        return self.is_proved


class Strikes:
    """All faults of plan.KINDS, one method each. ``strike(fault)`` calls the method of its kind."""

    def __init__(self, job: Job, network: Network, discovery: Hosts, slots: dict[str, int]) -> None:
        self._job = job
        self._network = network
        self._discovery = discovery
        self._slots = slots
        self._taken: set[str] = set()
        self._afflicted: set[str] = set()
        self.has_driver = True
        self.driver_killed_at: list[float] = []

    def strike(self, fault: Fault) -> Strike:
        """Begin a fault. Raises NobodyThere if its target does not exist."""
        proof, *mend = getattr(self, "_" + fault.kind)(fault)
        if not KINDS[fault.kind].hosts:
            return Strike(fault, proof, *mend)
        names = {self._host(index).name for index in fault.targets}
        self._afflicted |= names

        def mend_all() -> None:
            self._afflicted -= names
            mend[0]()

        return Strike(fault, proof, mend_all)

    # --------------------------------------------------------------------------------------------------------- targets

    def _processes(self, what: str, *hosts: Host) -> list[psutil.Process]:
        """Return the Python processes on these hosts (default: all) whose command line contains ``what``."""
        among = hosts or [self._network[name] for name in self._slots]
        storages = {host.storage.inode: host.name for host in among if host.has_power}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                words = process.cmdline()
                if what in words and Path(words[0]).name.startswith("python") and _lives(process):
                    name = storages.get(os.stat(f"/proc/{process.pid}/ns/net").st_ino)
                    worker = process.environ().get("ELASTICSTATE_WORKER", "")
                    if name is not None:
                        found.append((name, worker, process.pid, process))
        return [process for *_, process in sorted(found, key=lambda each: each[:3])]

    def workers(self) -> list[psutil.Process]:
        return self._processes(str(SCRIPT))

    def _rank_0(self) -> int:
        """Return the process with rank 0 in the newest world that has begun to train; 0 before the first world."""
        found = [tuple(map(int, path.read_text().split())) for path in self._job.logs.glob("*.at")]
        return max(((generation, pid) for generation, rank, pid in found if rank == 0), default=(0, 0))[1]

    def _one(self, fault: Fault, processes: Iterable[psutil.Process]) -> psutil.Process:
        awake = [p for p in processes if _status(p) not in ("", psutil.STATUS_STOPPED)]
        if not awake:
            raise NobodyThere
        return awake[fault.targets[0] % len(awake)]

    def _worker(self, fault: Fault) -> psutil.Process:
        return self._one(fault, self.workers())

    def _agents(self, *hosts: Host) -> list[psutil.Process]:
        return self._processes("elasticstate.agent", *hosts)

    def _agent(self, fault: Fault) -> psutil.Process:
        return self._one(fault, self._agents())

    def _host(self, index: int) -> Host:
        return self._network[list(self._slots)[index]]

    # ------------------------------------------------------------------------------------------------------ processes

    def _kill_worker(self, fault: Fault) -> tuple[Callable[[], bool]]:
        return _send(signal.SIGKILL, self._worker(fault))

    def _kill_rank_0(self, fault: Fault) -> tuple[Callable[[], bool]]:
        first = self._rank_0()
        return _send(signal.SIGKILL, self._one(fault, [p for p in self.workers() if p.pid == first]))

    def _kill_workers_of_host(self, fault: Fault) -> tuple[Callable[[], bool]]:
        host = _host_of(self._worker(fault))
        return _send(signal.SIGKILL, *(p for p in self.workers() if _host_of(p) == host))

    def _kill_all_workers(self, fault: Fault) -> tuple[Callable[[], bool]]:
        self._worker(fault)
        return _send(signal.SIGKILL, *self.workers())

    def _pause_worker(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return _stop(self._worker(fault))

    _freeze_worker = _pause_worker

    def _drain_worker(self, fault: Fault) -> tuple[Callable[[], bool]]:
        return _send(signal.SIGTERM, self._worker(fault))

    def _kill_agent(self, fault: Fault) -> tuple[Callable[[], bool]]:
        """Kill an agent. If no driver leads the job, the next one waits for it in vain, and may not reach its host: so
        another host must have a commit that is as new.
        """
        agent = self._agent(fault)
        if len(self._job.events("driver_restarted")) < len(self.driver_killed_at):
            inode = os.stat(f"/proc/{agent.pid}/ns/net").st_ino
            hosts = [self._network[name] for name in self._slots]
            host = next(host for host in hosts if host.has_power and host.storage.inode == inode)
            with _standing_still(self._processes(str(SCRIPT), host)):
                self._miss_if_it_alone_has_the_newest_commit(host)
                return _send(signal.SIGKILL, agent)
        return _send(signal.SIGKILL, agent)

    def _freeze_agent(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return _stop(self._agent(fault))

    def _kill_driver(self, _: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Kill the driver. The repair starts a new one, which reattaches."""
        if not self.has_driver:
            raise NobodyThere
        driver = psutil.Process(self._job.process.pid)
        self.has_driver = False
        self.driver_killed_at.append(time.time())
        self._job.kill_driver()

        def start() -> None:
            self._job.start(*self._job.arguments)
            self.has_driver = True

        return lambda: not _lives(driver), start

    # ------------------------------------------------------------------------------------------------ hosts and links

    def _drain_agent(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Send a preemption notice to a host. The repair lets discovery remove the host and name it again."""
        proof, *_ = _send(signal.SIGTERM, self._one(fault, self._agents(self._host(fault.targets[0]))))

        def name_anew() -> None:
            removed, give_back = self._take_host(fault)
            deadline = time.monotonic() + 5
            while not removed() and time.monotonic() < deadline:
                time.sleep(0.02)
            give_back()

        return proof, name_anew

    def _power_off(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Power a host off. Its commits are lost, so a reachable host must have a commit that is as new."""
        host = self._host(fault.targets[0])
        # else a worker might commit between the check and the power-off
        with _standing_still(self._processes(str(SCRIPT), host)):
            self._miss_if_it_alone_has_the_newest_commit(host)
            lost = list(_found(host.storage.pids()))
            host.power_off()
        return lambda: not any(map(_lives, lost)), host.power_on

    def _miss_if_it_alone_has_the_newest_commit(self, host: Host) -> None:
        """Raise NobodyThere unless a reachable host has a commit that is as new as that of this host."""
        others = [self._network[name] for name in self._slots if name not in {host.name, *self._afflicted}]
        if _newest_commit(host) > max(map(_newest_commit, others), default=NOTHING):
            raise NobodyThere

    def _cut(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        hosts = [self._host(index) for index in fault.targets]
        for host in hosts:
            host.cut()

        def heal() -> None:
            for host in hosts:
                host.heal()

        return lambda: all(host.is_cut() for host in hosts), heal

    _cut_two = _cut

    def _mute(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return self._rule(fault, lambda host: host.mute())

    def _deafen(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return self._rule(fault, lambda host: host.deafen())

    def _part_from_driver(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return self._rule(fault, lambda host: host.part_from(self._network["d"]))

    def _part_two(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return self._rule(fault, lambda host: host.part_from(self._host(fault.targets[1])))

    def _lose_packets(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        return self._rule(fault, lambda host: host.lose(fault.share))

    def _rule(self, fault: Fault, make: Callable[[Host], None]) -> tuple[Callable[[], bool], Callable[[], None]]:
        host = self._host(fault.targets[0])
        make(host)
        return lambda: host.dropped() > 0, host.mend

    def _take_host(self, fault: Fault) -> tuple[Callable[[], bool], Callable[[], None]]:
        name, now = list(self._slots)[fault.targets[0]], time.time()
        self._taken.add(name)
        self.say_hosts()

        def give_back() -> None:
            self._taken.remove(name)
            self.say_hosts()

        return lambda: any(e["host"] == name and e["time"] > now for e in self._job.events("host_removed")), give_back

    def say_hosts(self) -> None:
        """Update the hosts that discovery finds."""
        self._discovery.set(*(f"{name}:{slots}" for name, slots in self._slots.items() if name not in self._taken))


def _newest_commit(host: Host) -> CommitId:
    """Return the newest commit in the shared memory of a host, whether or not a worker lives there."""
    found = [NOTHING]
    for path in Path("/proc", str(host.storage.pid), "root", "dev", "shm").glob("elasticstate-*/*.control"):
        job_id = path.parent.name.split("-", 2)[2].removesuffix(f"-{host.name}")
        with suppress(OSError, ValueError):  # the file is being made or removed
            commit, _ = sealed_commits(page_at(path), owner_of(job_id, host.name, int(path.stem)))
            found += [commit] if commit is not None else []
    return max(found)


def _send(number: signal.Signals, *processes: psutil.Process) -> tuple[Callable[[], bool]]:
    """Send a signal that ends the processes, at once or later. Return the proof."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return (lambda: not any(map(_lives, processes)),)


def _stop(process: psutil.Process) -> tuple[Callable[[], bool], Callable[[], None]]:
    def go_on() -> None:
        with suppress(psutil.NoSuchProcess):
            process.resume()

    try:
        process.suspend()
    except psutil.NoSuchProcess:
        raise NobodyThere from None
    return lambda: _status(process) == psutil.STATUS_STOPPED, go_on


@contextmanager
def _standing_still(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Stop all threads of these processes for the time of the block. Processes stopped before remain stopped."""
    stopped = []
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if _status(process) != psutil.STATUS_STOPPED:
                    process.suspend()
                    stopped.append(process)
        deadline = time.monotonic() + 5
        while running := [process.pid for process in stopped if not _stands(process)]:
            assert time.monotonic() < deadline, f"processes {running} run on in spite of SIGSTOP"
            time.sleep(0.001)
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _stands(process: psutil.Process) -> bool:
    """Return True if all threads of the process are stopped, or if the process is gone."""
    states = []
    for path in Path("/proc", str(process.pid), "task").glob("*/stat"):
        with suppress(OSError):
            states.append(path.read_text().rpartition(") ")[2][0])
    return all(state in "TtZX" for state in states)


def _found(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield the processes that still exist."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _lives(process: psutil.Process) -> bool:
    return _status(process) not in ("", psutil.STATUS_ZOMBIE)


def _status(process: psutil.Process) -> str:
    """Return the status of a process; "" if the process is gone."""
    with suppress(psutil.NoSuchProcess):
        if process.is_running():
            return str(process.status())
    return ""


def _host_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.environ().get("ELASTICSTATE_WORKER", "")).split(":")[0]
    return ""
