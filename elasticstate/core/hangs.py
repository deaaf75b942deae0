"""Hangs: which collective was not entered by all ranks when --hang-timeout ended a generation.

The members of the ended generation report the collectives that they have entered. In each group, collectives have
numbers, and each rank enters them in this order. So the first collective that a rank has not entered is the one after
its last. The report is complete when all members have answered; a worker that holds the GIL never does. Then the end of
the hung worker, or the next world, completes the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replace_dataclass
from math import inf

from msgspec.structs import replace

from elasticstate.core.collectives import CollectivesReport, Finding, Hang
from elasticstate.core.records import Draft, Worker
from elasticstate.core.texts import ranks_text

DEFAULT_GROUP = "default_pg"
"""Description that torch gives to the group of all ranks."""


def compare(reports: Mapping[int, CollectivesReport], silent: tuple[int, ...] = ()) -> Finding:
    """Return the collective that not all ranks have entered. Of several groups, the one that most ranks wait in.

    Without such a collective, and with ``silent`` ranks, it is the last one that the others have entered. If ranks have
    entered different operations under one number, that is the reason.
    """
    return replace_dataclass(_not_entered_by_all(reports, silent), mixture=_mixture(reports))


def _not_entered_by_all(reports: Mapping[int, CollectivesReport], silent: tuple[int, ...]) -> Finding:
    found = [_in_group(group, reports, silent) for group in sorted(_groups(reports))]
    unequal = [finding for finding in found if finding.missing or (finding.silent and finding.entered)]
    if not unequal:
        return Finding(None, (), (), silent)
    return max(unequal, key=lambda finding: (bool(finding.missing), len(finding.entered)))


def _mixture(reports: Mapping[int, CollectivesReport]) -> str:
    """Return the first collective that is another operation on some ranks, as a clause; "" if there is none."""
    for group in sorted(_groups(reports)):
        ranks: dict[int, dict[str, list[int]]] = {}
        for rank, report in sorted(reports.items()):
            for each in report.collectives:
                if each.group == group:
                    ranks.setdefault(each.number, {}).setdefault(each.text.partition("(")[0], []).append(rank)
        for number, operations in sorted(ranks.items()):
            if len(operations) > 1:
                parts = [f"{operation} on {ranks_text(those)}" for operation, those in operations.items()]
                return f"collective {number} of {group} is {' and '.join(parts)}"
    return ""


def _groups(reports: Mapping[int, CollectivesReport]) -> set[str]:
    return {collective.group for report in reports.values() for collective in report.collectives}


def _in_group(group: str, reports: Mapping[int, CollectivesReport], silent: tuple[int, ...]) -> Finding:
    """Compare the ranks that have used a group. Who has not used it may be no member."""
    entered = {
        rank: {each.number: each for each in report.collectives if each.group == group}
        for rank, report in reports.items()
    }
    last = {rank: max(numbers, default=0) for rank, numbers in entered.items()}
    members = [rank for rank in sorted(last) if last[rank] or group == DEFAULT_GROUP]
    least, most = min(last[rank] for rank in members), max(last[rank] for rank in members)
    number = least + 1 if least < most else most
    collective = next((entered[rank][number] for rank in members if number in entered[rank]), None)
    inside = tuple(rank for rank in members if last[rank] >= number)
    return Finding(collective, inside, tuple(rank for rank in members if last[rank] < number), silent)


def begin_hang(d: Draft, members: list[Worker]) -> None:
    """Await the reports of the members of the present generation, which has ended because it hangs."""
    ranks = {str(worker.id): worker.rank for worker in members if worker.rank is not None}
    d.update_ledger(hang=Hang(d.generation, ranks, {}))


def collectives_reported(d: Draft, worker: Worker, report: CollectivesReport) -> None:
    """Record the report of a member. Report the hang when it is the last one."""
    hang = d.ledger.hang
    if hang is None or hang.found is not None or hang.generation != report.generation:
        return
    rank = hang.ranks.get(str(worker.id))
    if rank is None:
        return
    hang = replace(hang, reports={**hang.reports, rank: report})
    d.update_ledger(hang=hang)
    if len(hang.reports) == len(hang.ranks):
        report_hang(d)


def report_hang(d: Draft) -> None:
    """Report the hang, with the reports that have arrived, unless that is done or there is none."""
    hang = d.ledger.hang
    if hang is None or hang.found is not None:
        return
    silent = tuple(sorted(set(hang.ranks.values()) - set(hang.reports)))
    found = compare(hang.reports, silent) if hang.reports else Finding(None, (), (), silent)
    d.update_ledger(hang=replace(hang, found=found))
    call = found.collective
    d.note(
        "hang",
        ended=hang.generation,
        call=call.text if call is not None else None,
        group=call.group if call is not None else None,
        number=call.number if call is not None else None,
        entered=list(found.entered),
        missing=list(found.missing),
        silent=list(found.silent),
        lines={str(rank): hang.reports[rank].line for rank in found.missing},
        stacks={str(rank): hang.reports[rank].stack for rank in found.missing},
        text=found.text(),
    )


def reports_until(d: Draft, since: float) -> float:
    """Return the time until which READY members may report the hang that has ended their generation at ``since``; -inf
    if no report is awaited.

    A member that was freed before its END arrived is READY before it reports.
    """
    hang = d.ledger.hang
    if hang is None or hang.found is not None or hang.generation != d.generation:
        return -inf
    is_awaited = any(member.ready is not None and member.rank not in hang.reports for member in d.members())
    return since + d.policy.failure_grace_s if is_awaited else -inf


def hang_text(d: Draft, worker: Worker) -> str:
    """Return what the hang of the worker's generation was, as a clause for its root cause; "" without one."""
    hang = d.ledger.hang
    if hang is None or hang.found is None or str(worker.id) not in hang.ranks:
        return ""
    return f"; {hang.found.text()}"
