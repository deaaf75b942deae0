"""The guide shows what changes in a script: at most six lines. Its new lines are those of the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/guides/huggingface.md").read_text(encoding="utf-8"), re.DOTALL)
EXAMPLES = ("trainer.py", "accelerate_loop.py")


@pytest.mark.parametrize(("diff", "example"), list(zip(DIFFS, EXAMPLES, strict=True)), ids=EXAMPLES)
def test_at_most_six_lines_change(diff: str, example: str) -> None:
    changed = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(changed) <= 6
    script = (ROOT / "examples" / example).read_text(encoding="utf-8").splitlines()
    assert [line for line in changed if line not in script] == []
    removed = [line for line in diff.splitlines() if line.startswith("-")]
    assert len(removed) <= len(changed)
