"""A second account of the time of a job, from the events of the core. It must agree with the core's account."""

from __future__ import annotations

from collections import Counter
from math import isclose

from elasticstate.core import types as t
from elasticstate.core.figures import Times
from elasticstate.core.step import Transition


class Books:
    """Check of each step: the parts add up to the wall time, and those of the generations to those of the job."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._ended: Counter[str] = Counter()  # seconds of the generations that have ended
        self.reached: Counter[str] = Counter()

    def see(self, now: float, transition: Transition) -> None:
        if self._began_at is None:
            self._began_at = now
        account = transition.next.ledger.account
        for effect in transition.effects:
            if isinstance(effect, t.Note) and effect.event == "generation_finished":
                self._generation_has_ended(effect)
        job, present = account.job(now), account.until(now).present
        assert isclose(job.wall_s, now - self._began_at, rel_tol=0.0, abs_tol=1e-6), (
            "goodput and badput are the wall time"
        )
        for part in Times.__struct_fields__:
            seconds: float = getattr(job, part)
            assert seconds >= -1e-9, f"{part} is {seconds}"
            assert getattr(present, part) >= -1e-9, f"{part} of the present generation"
            generations_s = self._ended[part] + getattr(present, part)
            assert isclose(generations_s, seconds, rel_tol=0.0, abs_tol=1e-3), (
                f"{part} of the generations and of the job"
            )
            self.reached[f"time: {part}"] += seconds > 1e-6

    def _generation_has_ended(self, note: t.Note) -> None:
        badput = note.get("badput_s")
        wall_s, goodput_s, earlier_s = (note.get(name) for name in ("wall_s", "goodput_s", "redone_earlier_s"))
        assert isinstance(badput, dict)
        assert isinstance(wall_s, float)
        assert isinstance(goodput_s, float)
        assert isinstance(earlier_s, float)
        assert isclose(wall_s, goodput_s + sum(badput.values()), rel_tol=0.0, abs_tol=1e-4)
        assert all(seconds > 0 for seconds in badput.values())
        self._ended.update({"goodput": goodput_s - earlier_s, **badput})
        self._ended["redone_ticks"] += earlier_s
        self.reached["time: redone of earlier generations"] += earlier_s > 0
