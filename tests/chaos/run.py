"""Run of a job on several hosts under the faults of a plan, and checks of its result."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.chaos.account import check_the_account
from tests.chaos.plan import HEARTBEAT_S, KINDS, Fault, make_plan, tally
from tests.chaos.strikes import SCRIPT, NobodyThere, Strike, Strikes
from tests.kit.hosts import check_no_two_worlds
from tests.kit.job import Hosts, Job, Line
from tests.kit.network import Network

SLOTS = {"a": 2, "b": 1, "c": 1}
SIZE = 4  # of the world when no host is afflicted
OPTIONS = (
    *("-np", str(SIZE), "--min-np", "1", "--max-np", str(SIZE)),
    *("--heartbeat-timeout", str(HEARTBEAT_S), "--stop-timeout", "5"),
    *("--orphan-timeout", "20"),  # longer than any host is unreachable
    *("--job-name", "chaos"),
    *("--join-window", "2", "--min-interrupt-distance", "0.5"),
    # A driver that was dead while a drained host was named anew waits for the end of its cooldown, the longest one.
    *("--cooldown-range", "1", "15", "--reset-limit", "1000", "--elastic-timeout", "180"),
)
PROOF_TIMEOUT_S = 45.0  # a drain may take --drain-timeout
PATIENCE_S = 10.0  # how long a process fault waits for a target; a host fault waits as long as it lasts
END_TIMEOUT_S = 120.0  # from the last fault to the end of the job
MINUTES_OF_ALL_KINDS = 3.0  # in a plan of so many minutes, each kind is due four times
MEAN_S = 3.0  # between two faults that took effect, at most
EVENTS_SHOWN = 30
OUTPUT_SHOWN = 6000  # characters


class Chaos:
    """One job and its faults. ``run()`` also checks the result; ``report()`` follows.

    It lasts until each kind of fault has struck, and for the given minutes if these are more.
    """

    def __init__(self, directory: Path, seed: int, minutes: float) -> None:
        self._directory = directory
        self._seed = seed
        self._minutes = minutes
        self._plan = make_plan(seed, max(minutes, MINUTES_OF_ALL_KINDS), len(SLOTS))
        self._spares = seed % 2  # on host b, or where else a slot is free
        self._records_ticks = seed // 2 % 2 == 0
        self._lasted_s = 0.0
        self._struck: list[Strike] = []
        self._missed: list[Fault] = []
        self._pending: list[Strike] = []
        self._said: list[str] = []

    @property
    def again(self) -> str:
        return f"make chaos MINUTES={self._minutes:g} SEED={self._seed}"

    def run(self) -> None:
        """Run the job and all faults. Raises AssertionError with all details that a maintainer needs."""
        with Network(self._directory, *SLOTS) as network:
            self.namespaces = network.namespaces
            discovery = Hosts(self._directory)
            slots = {**SLOTS, "b": SLOTS["b"] + self._spares}
            options = (*OPTIONS, "--spares", str(self._spares), *(("--tick-records",) if self._records_ticks else ()))
            discovery.set(*(f"{name}:{count}" for name, count in slots.items()))
            stop = self._directory / "stop"
            command = [sys.executable, str(SCRIPT), "--log", str(self._directory / "logs"), "--stop", str(stop)]
            within = network["d"].storage.enter()
            with Job(self._directory, *options, *discovery.options, command=command, within=within) as self.job:
                try:
                    strikes = Strikes(self.job, network, discovery, slots)
                    self._strike_all(strikes)
                    self._wait_until_all_are_back()
                    self.job.stop_file.touch()
                    self.job.finish(timeout=END_TIMEOUT_S)
                    self._check()
                    check_the_account(self.job, strikes.driver_killed_at)
                except Exception as error:
                    raise AssertionError(f"{error}\n{self._what_was()}") from error

    # ---------------------------------------------------------------------------------------------------- the faults

    def _strike_all(self, strikes: Strikes) -> None:
        self.job.wait_for("tick", lambda: self.job.log("tick"))
        self._began = time.monotonic()
        order = itertools.count()
        due: list[tuple[float, int, Callable[[], None]]] = []
        planned = deque(self._plan)

        def begin(fault: Fault) -> None:
            try:
                strike = strikes.strike(fault)
            except NobodyThere:
                patience_s = fault.lasts_s if KINDS[fault.kind].hosts else PATIENCE_S
                if self._elapsed_s() < fault.at_s + patience_s:
                    heapq.heappush(due, (self._elapsed_s() + 0.2, next(order), lambda: begin(fault)))
                else:
                    self._missed.append(fault)
                    self._say(f"{fault}: nobody there")
                return
            self._pending.append(strike)
            self._say(str(fault))
            if strike.mend is not None:
                since_s = fault.at_s if KINDS[fault.kind].hosts else self._elapsed_s()
                heapq.heappush(due, (since_s + fault.lasts_s, next(order), lambda: end(strike)))

        def end(strike: Strike) -> None:
            assert strike.mend is not None
            deadline = time.monotonic() + 1.0  # the fault may have begun late
            while not strike.look() and time.monotonic() < deadline:
                time.sleep(0.02)
            strike.mend()
            if strike.fault.lasts_s > 1:
                self._say(f"{strike.fault}: mended")

        while True:
            if planned and self._have_all_kinds() and self._elapsed_s() > 60 * self._minutes:
                planned.clear()
            if planned:
                self._lasted_s = self._elapsed_s()
            while planned and planned[0].at_s <= self._elapsed_s():
                fault = planned.popleft()
                heapq.heappush(due, (fault.at_s, next(order), partial(begin, fault)))
            while due and due[0][0] <= self._elapsed_s():
                heapq.heappop(due)[2]()
            self._look_for_proof()
            status = self.job.process.poll()
            assert status is None or not strikes.has_driver, (
                f"the job has ended with status {status} in the middle of the chaos"
            )
            if not planned and not due and not self._pending and strikes.has_driver:
                return  # every fault has been repaired
            time.sleep(0.02)

    def _have_all_kinds(self) -> bool:
        """Return True if each kind has struck.

        An exception is power_off: whenever it was due, that host alone may have had the newest commit.
        """
        missing = {kind for kind, count in tally(fault.kind for fault in self._faults()).items() if not count}
        return missing <= {fault.kind for fault in self._missed if fault.kind == "power_off"}

    def _wait_until_all_are_back(self) -> None:
        """Wait until the newest world is complete, and until failures of dead workers would have been detected."""
        decisive = ("world_formed", "end", "worker_exited", "agent_lost")

        def all_are_back() -> bool:
            found = [event for event in self.job.events() if event["event"] in decisive]
            settled = time.time() - found[-1]["time"] > 1.5 * HEARTBEAT_S
            # With a spare, a drained worker or a host may end without another world.
            last = [event for event in found if event["event"] in ("world_formed", "end")][-1]
            return settled and last["event"] == "world_formed" and last["size"] == SIZE

        self.job.wait_for("world of full size after the faults", all_are_back, END_TIMEOUT_S)

    def _look_for_proof(self) -> None:
        """Count the faults that have struck. Give up those without effect: a later fault can prevent a drain."""
        self._struck += [strike for strike in self._pending if strike.look()]
        self._pending = [strike for strike in self._pending if not strike.is_proved]
        late = [strike for strike in self._pending if self._elapsed_s() > strike.fault.at_s + PROOF_TIMEOUT_S]
        for strike in late:
            self._pending.remove(strike)
            self._missed.append(strike.fault)
            self._say(f"{strike.fault}: not seen to have struck")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str) -> None:
        self._said.append(f"{time.time():.3f} at {self._elapsed_s():.1f} s: {text}")

    # ---------------------------------------------------------------------------------------------------- the outcome

    def _check(self) -> None:
        self.job.check_survival()
        check_no_two_worlds(self.job, "tick")
        check_no_tick_is_counted_twice(self.job.log("tick"))
        check_the_result(self.job.log("final"))
        mean_s = self._lasted_s / len(self._struck)
        assert mean_s <= MEAN_S, f"a fault every {mean_s:.2f} s"
        assert self._have_all_kinds(), f"not every kind has struck: {tally(fault.kind for fault in self._faults())}"

    def report(self) -> str:
        """Return a report: faults by kind, generations, goodput, and the command that repeats the run."""
        struck, missed = (tally(fault.kind for fault in faults) for faults in (self._faults(), self._missed))
        rows = [
            f"  {kind:<22}{struck[kind]:>5}" + (f"  ({n} more did not strike)" if (n := missed[kind]) else "")
            for kind in KINDS
        ]
        finished = self.job.events("job_finished")[-1]
        ticks = [line["time"] for line in self.job.log("tick")]
        pause_s = max(b - a for a, b in pairwise(ticks))
        mean_s = self._lasted_s / len(self._struck)
        return "\n".join(
            (
                f"chaos: {len(self._struck)} faults, one every {mean_s:.2f} s; spares: {self._spares}; tick records: "
                f"{self._records_ticks}",
                *rows,
                f"  generations {finished['generations']}, goodput {finished['goodput']}, "
                f"steps {self.job.log('final')[0]['step']}, longest pause {pause_s:.1f} s",
                f"  again: {self.again}",
            )
        )

    def _faults(self) -> list[Fault]:
        return [strike.fault for strike in self._struck]

    def _what_was(self) -> str:
        events = [json.dumps(event) for event in self.job.events()[-EVENTS_SHOWN:]]
        return "\n".join(
            (
                "the last faults:",
                *self._said[-EVENTS_SHOWN:],
                "the last events:",
                *events,
                "the last output:",
                self.job.output[-OUTPUT_SHOWN:],
                f"all in {self._directory}; again: {self.again}",
            )
        )


def check_no_tick_is_counted_twice(ticks: list[Line]) -> None:
    """Check that each worker makes each tick of a generation once, in order."""
    made: dict[tuple[int, int], list[int]] = {}
    for line in ticks:
        made.setdefault((line["generation"], line["pid"]), []).append(line["step"])
    for where, steps in made.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))), (where, steps)


def check_the_result(finals: list[Line]) -> None:
    """Check the sums over all worlds against the number of steps and the data. Each step must count exactly once."""
    for final in finals:
        assert final["total"] == final["step"] * (final["step"] - 1) // 2, final
        assert final["seen"] == final["epoch"] * final["items"] + final["consumed"], final
        assert final["least"] >= final["epoch"], final
        assert final["most"] <= final["epoch"] + 1, final
