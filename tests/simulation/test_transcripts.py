"""The golden transcripts: the core's answers in the important scenarios, byte for byte, in a readable form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.transcripts import TRANSCRIPTS, replay

SCENARIOS = (
    "all_but_one_die",
    "all_killed_at_once",
    "all_unreachable",
    "below_min_np_and_back",
    "below_min_np_for_too_long",
    "cut_link",
    "death_while_forming",
    "divergence",
    "divergence_restore",
    "drain_and_death_together",
    "evicted_host",
    "finish_in_the_gate",
    "first_round_fails",
    "host_joins",
    "host_of_only_commit_lost",
    "host_removed",
    "host_unreachable_and_back",
    "horovod_reset_limit",
    "horovod_start",
    "hosts_in_cooldown",
    "lease",
    "newcomer_dies_before_it_is_ready",
    "newcomer_returns_without_the_state",
    "no_progress",
    "one_of_all_unreachable_is_back",
    "one_worker_dies",
    "own_error_of_all",
    "own_error_of_one",
    "plain_and_elastic",
    "plain_commands",
    "plain_world",
    "plain_world_fails",
    "preemption_cooldown_gives_way",
    "preemption_notice",
    "preemption_notices_of_several_hosts",
    "rank_0_dies",
    "reset_limit",
    "retained_commit_awaited",
    "retained_commit_lost",
    "sharded_host_joins",
    "sharded_host_leaves",
    "sharded_host_lost",
    "sharded_line_unreachable",
    "sharded_worker_dies",
    "slot_backoff",
    "stall",
    "stall_shutdown",
    "straggler",
    "start",
    "state_lost",
    "stopped",
    "stopped_too_late",
    "whole_groups",
)


def test_every_scenario_has_its_transcript() -> None:
    assert sorted(path.stem for path in TRANSCRIPTS.glob("*.txt")) == sorted(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_core_answers_as_in_the_transcript(scenario: str) -> None:
    text = Path(TRANSCRIPTS, f"{scenario}.txt").read_text()
    assert text.startswith("# "), "the header names the property"
    assert replay(text) == text, "run python -m tests.simulation.transcripts --update, and read the diff"
