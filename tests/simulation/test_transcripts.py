"""The golden transcripts: the core's answers in the important scenarios, byte for byte, in a readable form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.transcripts import TRANSCRIPTS, replay

SCENARIOS = (
    "all_but_one_die",
    "all_killed_at_once",
    "all_out_of_reach",
    "back_without_the_state",
    "below_min_np_and_back",
    "below_min_np_for_too_long",
    "death_while_forming",
    "evicted_host",
    "finish_in_the_gate",
    "holders_host_gone",
    "host_joins",
    "host_leaves",
    "host_out_of_reach_and_back",
    "hosts_in_cooldown",
    "lease",
    "leave_and_death_together",
    "memory_is_awaited",
    "memory_lost",
    "newcomer_dies_before_it_is_ready",
    "no_progress",
    "notice_gives_way",
    "notice_of_a_host",
    "notice_of_several_hosts",
    "one_of_all_out_of_reach_is_back",
    "one_worker_dies",
    "own_error_of_all",
    "own_error_of_one",
    "plain_commands",
    "rank_0_dies",
    "reset_limit",
    "reset_window",
    "slot_budget",
    "start",
    "state_lost",
)


def test_every_scenario_has_its_transcript() -> None:
    assert sorted(path.stem for path in TRANSCRIPTS.glob("*.txt")) == sorted(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_core_says_what_the_transcript_says(scenario: str) -> None:
    text = Path(TRANSCRIPTS, f"{scenario}.txt").read_text()
    assert text.startswith("# "), "the header says which property it shows"
    assert replay(text) == text, "if this is meant: python -m tests.simulation.transcripts --update, and read the diff"
