"""Work that no commit holds: a warning before it is lost, and its amount when it is.

A job need not commit: then a failure sends it back to where it began. Whoever has forgotten ``commit()`` would learn
that from the first failure only. So the core warns, once in a job, when a world has completed many ticks, or has
trained for long, and no member has called ``commit()`` in the whole job. A call whose tick is not saved
(``commit(every=N)``) counts, because commits will come. A world without any tick has a notice of its own
(standstill.py), which says the same.

A job may also commit once, or seldom, and train on. Then a failure loses much of a tick, which no number of ticks says.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticstate.core.phases import Running
from elasticstate.core.records import Draft, Worker
from elasticstate.core.texts import number_of

_MANY = 100  # ticks
_AT_LEAST_S = 5.0  # less work than this is no loss to warn of
_FEW = 5  # ticks that a world has completed at least before time alone decides
_LONG_S = 1.0  # from which the part of a tick that a failure has cut off is told
_INACCURACY_S = 1.0  # of the time of the last tick, if no survivor reports it


def check_commits(d: Draft, phase: Running, members: Sequence[Worker]) -> None:
    """Warn if the job trains and commits nothing."""
    ledger = d.ledger
    if ledger.commits_come or ledger.commit_warned or not phase.first_tick:
        return
    ticks, seconds = ledger.ticking.completed, ledger.ticking.at - phase.since
    is_much = ticks > _MANY and seconds >= _AT_LEAST_S
    is_long = ticks >= _FEW and seconds >= d.policy.no_tick_notice_s
    if not is_much and not is_long:
        return
    if any(w.commit is not None and w.commit.generation == d.generation and w.commit.tick for w in members):
        d.update_ledger(commits_come=True)
        return
    d.update_ledger(commit_warned=True)
    d.warn(
        f"nothing was committed in the first {number_of(ticks, 'tick')} ({seconds:.0f} s) of generation "
        f"{d.generation}: a failure may lose them all. Call state.commit() in the training loop; commit(every=N) saves "
        f"at each N-th tick"
    )


def lost_with_nothing_committed_s(d: Draft) -> float:
    """Return the seconds that the present generation has trained, if the job has never committed: its end loses them.

    Warn if the job has no ticks, so that no event will say that training has resumed.
    """
    if d.ledger.highest is not None or d.ledger.durable is not None:
        return 0.0
    present = d.ledger.account.until(d.now).present
    seconds = present.goodput + present.commit_stall + present.redone_ticks + present.no_ticks
    if not d.ledger.has_ticked and round(seconds, 1):
        d.warn(
            f"generation {d.generation + 1} begins from scratch: generation {d.generation} made no tick and no commit, "
            f"so all of its work ({seconds:.1f} s, an unknown number of steps) is lost. Call state.commit() in the "
            f"training loop"
        )
    return seconds


def lost_in_an_unfinished_tick_s(d: Draft, completed: int) -> float:
    """Return the seconds that the present generation has trained since its last tick, if the job has committed and they
    are not few: its end loses them.

    ``completed``: ticks of the generation. After some, the lost part of a tick is small, or the failure was found late.
    """
    if completed > 1 or (d.ledger.highest is None and d.ledger.durable is None):
        return 0.0
    account, ticking = d.ledger.account.until(d.now), d.ledger.ticking
    seconds, cut = account.present.no_ticks, account.cut
    least = _LONG_S
    if cut is not None and cut.is_proven:
        seconds += max(0.0, cut.unproven_s - cut.gap_s)
    elif cut is not None:
        seconds += max(0.0, cut.at - ticking.at - cut.gap_s)
        least += _INACCURACY_S
    return seconds if seconds >= least else 0.0
