"""When a worker is given up. The clock is an argument."""

from __future__ import annotations

from elasticstate.agent.agent import Pulse
from elasticstate.net.messages import Stamp


def beat(pulse: Pulse, now: float, place: str = "train", ticks: int = 0) -> None:
    pulse.beat(Stamp(place, 1, ticks, None), now)


def test_a_worker_that_stamps_is_well() -> None:
    pulse = Pulse(0.0, 0.0)
    beat(pulse, 9.0)
    assert pulse.verdict(18.0, 10.0, None) == ""


def test_a_silent_worker_is_given_up_after_the_heartbeat_timeout() -> None:
    pulse = Pulse(0.0, 0.0)
    assert pulse.verdict(10.0, 10.0, None) == ""
    assert pulse.verdict(10.1, 10.0, None) == "no sign of life for --heartbeat-timeout of 10 s"


def test_a_worker_that_stamps_without_ticks_hangs() -> None:
    pulse = Pulse(0.0, 0.0)
    for now in range(1, 8):
        beat(pulse, float(now), ticks=min(now, 2))
    assert pulse.verdict(7.0, 10.0, None) == ""
    assert pulse.verdict(7.0, 10.0, 5.0) == ""
    assert pulse.verdict(7.1, 10.0, 5.0) == "no tick for --hang-timeout of 5 s"


def test_only_training_can_hang() -> None:
    for place in ("boot", "regroup", "gate"):
        pulse = Pulse(0.0, 0.0)
        for now in range(20):
            beat(pulse, float(now), place)
        assert pulse.verdict(19.5, 10.0, 5.0) == ""


def test_behind_the_gate_nobody_is_judged() -> None:
    pulse = Pulse(0.0, 0.0)
    beat(pulse, 1.0, "done")
    assert pulse.verdict(1000.0, 10.0, 5.0) == ""
