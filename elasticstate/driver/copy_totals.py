"""Memory and bandwidth of the kept copies of a sharded job, over all hosts, as their agents report them."""

from __future__ import annotations

from elasticstate.core.copies import CopyFigures

_WINDOW_S = 10.0  # over which the bandwidth is measured
_SAMPLE_S = 1.0  # between two samples


class CopyTotals:
    """Totals of a job. Only the event loop changes them, so any thread may read them. Times: the event loop's clock."""

    def __init__(self) -> None:
        self.sent_bytes = 0  # by all agents, also by those that are gone
        self.received_bytes = 0
        self._hosts: dict[str, CopyFigures] = {}
        self._samples: tuple[tuple[float, int], ...] = ()  # time, bytes sent; the oldest first

    def update(self, host: str, figures: CopyFigures, now: float) -> None:
        """Enter the report of an agent. Its counters begin at 0 when it starts."""
        before = self._hosts.get(host, CopyFigures())
        if before != figures:
            is_same = figures.sent_bytes >= before.sent_bytes and figures.received_bytes >= before.received_bytes
            since = before if is_same else CopyFigures()
            self.sent_bytes += figures.sent_bytes - since.sent_bytes
            self.received_bytes += figures.received_bytes - since.received_bytes
            self._hosts[host] = figures
        if self._hosts and (not self._samples or now >= self._samples[-1][0] + _SAMPLE_S):
            kept = [sample for sample in self._samples if sample[0] >= now - _WINDOW_S]
            self._samples = (*kept, (now, self.sent_bytes))

    def host_lost(self, host: str) -> None:
        """Count the memory of a host no more. It may return with the same agent, so its counters stay."""
        if host in self._hosts:
            self._hosts[host] = self._hosts[host]._replace(memory_bytes=0)

    def memory(self) -> dict[str, int]:
        """Return the bytes of the copies on each host that has some."""
        return {host: figures.memory_bytes for host, figures in list(self._hosts.items()) if figures.memory_bytes}

    def bytes_per_s(self, now: float) -> float:
        """Return the bytes that all hosts together have sent per second lately."""
        samples = [sample for sample in self._samples if sample[0] >= now - _WINDOW_S]
        if not samples or now - samples[0][0] < _SAMPLE_S:
            return 0.0
        return (self.sent_bytes - samples[0][1]) / (now - samples[0][0])
