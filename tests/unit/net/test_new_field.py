"""A new field of a worker's message touches the message, and the code that fills and uses it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import elasticstate

PACKAGE = Path(elasticstate.__file__).parent
TRAVEL = """
from elasticstate.core import types as t
from elasticstate.core.step import new_membership, step
from elasticstate.net import link, messages
from tests.kit.policy import policy_of

W = t.WorkerId("a", 0, 1)
m = new_membership(policy_of(np=2, min_np=2))
for event in (t.HostsDiscovered((t.HostSlots("a", 2),)), t.AgentJoined("a")):
    m = step(m, event, 0.0).next
said = link.encode_from_worker(messages.{message}, novelty=7))
sent = messages.encode(messages.FromWorker(W, messages.decode_from_worker(said)))
event = messages.decode_from_agent(sent)
assert event.body.novelty == 7
m = step(m, event, 1.0).next
print({shown})
"""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('Ready(0, None, None, "a:1"', "m.workers[W].ready.novelty"),
        ("Gate(0", "event.body.novelty"),
        ("HoldAnswer(0, 1, False", "event.body.novelty"),
    ],
)
def test_a_new_field_travels_from_a_worker_into_the_core_by_one_edit(tmp_path: Path, message: str, shown: str) -> None:
    copy = tmp_path / "elasticstate"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    types = copy / "core/types.py"
    name = message.partition("(")[0]
    text, edits = re.subn(
        rf"(class {name}\(Message.*?\n)((?=\n\nclass )|(?=\n\n# ))",
        r"\1    novelty: int = 0\n",
        types.read_text(),
        flags=re.S,
    )
    assert edits == 1
    types.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", TRAVEL.format(message=message, shown=shown)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("7\n", "")
