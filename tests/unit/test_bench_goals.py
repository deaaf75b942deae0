"""A benchmark meets or misses its goals alike on an idle and on a loaded machine."""

from __future__ import annotations

import pytest

from tests.bench import bench_commit, bench_sampler

IDLE_S = {"commit": 0.288, "restore": 1.287, "deepcopy": 3.133, "foreach": 0.1, "memcpy": 0.009}  # at 1 KB


@pytest.mark.parametrize(("slower_commit", "met"), [(1, True), (3, False)])
def test_load_changes_no_verdict_on_a_commit(slower_commit: float, met: bool) -> None:
    for load in (1, 20):
        found = {way: [(seconds * load, 0)] * 3 for way, seconds in IDLE_S.items()}
        found["commit"] = [(seconds * slower_commit, 0) for seconds, _ in found["commit"]]
        verdicts = [figure >= goal for _, figure, goal in bench_commit.Row("1 KB", found).goals()]
        assert verdicts == [met]


def test_load_changes_no_verdict_on_a_tick() -> None:
    assert bench_commit.calls_of_tick([(3e-7, 4e-8)] * 3) == pytest.approx(bench_commit.calls_of_tick([(6e-6, 8e-7)]))


@pytest.mark.parametrize(("slower_draw", "missed"), [(1, False), (4, True)])
def test_load_changes_no_verdict_on_a_sampler(slower_draw: float, missed: bool) -> None:
    for load in (1, 20):
        ours = bench_sampler.Figures(10**9, 0.2 * load, 0.0, 14e6 / load / slower_draw)
        torchs = bench_sampler.Figures(10**7, 670 * load, 320.0, 56e6 / load)
        assert bench_sampler.is_missed(*bench_sampler.ratios([ours] * 3, [torchs] * 3)) == missed
