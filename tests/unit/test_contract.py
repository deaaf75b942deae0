"""The names that other programs use are those of DESIGN.md, sections 2, 3 and 8, minus those that come later."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import elasticstate
from elasticstate import config, errors

DESIGN = (Path(__file__).parents[2] / "DESIGN.md").read_text(encoding="utf-8")

LATER_OPTIONS = {
    "--join",
    "--network-interface",
}


def section(number: int) -> str:
    return DESIGN.split(f"\n## {number}. ")[1].split("\n## ")[0]


PACKAGES = {"horovod", "huggingface", "lightning", "loggers"}


def test_all_public_names_of_the_design_are_there_and_no_others() -> None:
    rows = [line.split("|")[1] for line in section(2).splitlines() if line.startswith("| `")]
    spans = " ".join(re.findall(r"`([^`]+)`", " ".join(rows)))
    while "(" in spans:
        spans = re.sub(r"\([^()]*\)(?: -> \w+)?", " ", spans)  # the innermost arguments
    named = set(re.findall(r"[A-Za-z_]\w+", spans)) - {"elasticstate", *PACKAGES}
    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    expected = named | tree
    assert set(elasticstate.__all__) == expected
    for name in elasticstate.__all__:
        assert getattr(elasticstate, name) is not None


def test_the_exception_tree_is_drawn_as_it_is() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn == {name for name, value in vars(errors).items() if isinstance(value, type)}


def test_state_has_the_methods_of_the_design() -> None:
    row = next(line for line in section(2).splitlines() if line.startswith("| `State`"))
    named = set(re.findall(r"(\w+)\(", row.split("|")[2]))
    assert named >= {"commit", "save", "restore", "sync", "check_host_updates", "register_reset_callbacks", "on_reset"}
    for name in named:
        assert callable(getattr(elasticstate.State, name))


def test_all_options_of_the_design_are_there_and_no_others() -> None:
    options = section(3).split("Options of torchrun")[0].replace("--lr", "")
    named = set(re.findall(r"--[a-z-]+", options))
    ours = {name for option in config.option_names().values() for name in option.names if name.startswith("--")}
    assert ours | {"--version", "--reattach", "--check", "--json", "--watch"} == named - LATER_OPTIONS


def test_every_event_of_the_design_is_written_somewhere_and_no_other() -> None:
    named = set(re.findall(r"`(\w+)`", section(8).split("NAME among")[1].split("`downtime_s`:")[0]))
    sources = Path(elasticstate.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources.rglob("*.py"))
    missing = {name for name in named if f'"{name}"' not in text}
    assert not missing


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
