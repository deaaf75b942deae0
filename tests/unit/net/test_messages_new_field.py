"""A new field of a message, or of a world, touches its declaration, and the code that fills and uses it."""

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
OF_A_WORLD = """
from elasticstate.core import types as t
from elasticstate.core.worlds import assign, parts_of
from elasticstate.net import messages

members = assign([(t.WorkerId("a", slot, 1), slot) for slot in range(2)])
world = t.World(1, members, 2, 0, (), "a:1", novelty=7)
for _, part in parts_of(world, t.MemberOptions(60.0, 60.0, False, False), {}):
    sent = messages.decode_to_agent(messages.encode(part))
    for reader, member in enumerate(sent.members):
        own = messages.msgspec.structs.replace(sent, reader=reader)
        shown = messages.decode_to_worker(messages.encode_to_worker(own))
        print(shown.novelty, shown.rank)
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
    name = message.partition("(")[0]
    edit = rf"(class {name}\(Message.*?\n)((?=\n\nclass )|(?=\n\n# ))"
    assert printed_with_a_new_field(tmp_path, edit, TRAVEL.format(message=message, shown=shown)) == "7\n"


def test_a_new_field_of_a_world_travels_from_the_core_to_its_members_by_one_edit(tmp_path: Path) -> None:
    edit = r"(class World\(Message.*?\n    reader: [^\n]*\n)()"
    assert printed_with_a_new_field(tmp_path, edit, OF_A_WORLD) == "7 0\n7 1\n"


def printed_with_a_new_field(tmp_path: Path, edit: str, program: str) -> str:
    """Return what a program prints with a copy of the package in which one class has the field ``novelty``."""
    copy = tmp_path / "elasticstate"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    types = copy / "core/types.py"
    text, edits = re.subn(edit, r"\1    novelty: int = 0\n", types.read_text(), flags=re.S)
    assert edits == 1
    types.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout
