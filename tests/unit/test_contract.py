"""The names that other programs use are those of the reference (docs/reference)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import elasticstate
from elasticstate import errors

API = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")


def test_all_public_names_are_in_the_reference_and_no_others() -> None:
    named = set(re.findall(r"^::: elasticstate\.(\w+)$", API, re.MULTILINE)) - {"extension"}
    assert set(elasticstate.__all__) - {"CopyError"} == named  # internal, but in the tree
    for name in elasticstate.__all__:
        assert getattr(elasticstate, name) is not None


def test_the_exception_tree_is_drawn_as_it_is() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn == {name for name, value in vars(errors).items() if isinstance(value, type)}


def test_state_has_the_methods_of_the_reference() -> None:
    members = API.split("::: elasticstate.State\n")[1].split("]")[0].split("[")[1]
    named = set(re.findall(r"\w+", members))
    assert named >= {"commit", "save", "restore", "sync", "check_host_updates", "register_reset_callbacks", "on_reset"}
    for name in named:
        assert callable(getattr(elasticstate.State, name))


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time\nfrom elasticstate.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'cryptography', 'asyncio', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert time.process_time() < 0.3, time.process_time()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
