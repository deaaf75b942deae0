from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from elasticstate.cli import run
from elasticstate.errors import OptionError
from elasticstate.options import Options

LATIN_1 = os.fsdecode("caf\xe9".encode("latin-1"))


@pytest.mark.parametrize(
    ("command", "variables", "begin"),
    [
        (("python", LATIN_1), (), r"the command: 'caf\\udce9': must be UTF-8\."),
        (("python",), (("FOO", LATIN_1),), r"a variable for other hosts: 'FOO=caf\\udce9': must be UTF-8\."),
        (("python",), (), ""),
        (("python", "caf\xe9"), (("FOO", "\U0001f600"),), ""),
    ],
)
def test_what_is_sent_must_be_text(command: tuple[str, ...], variables: Any, begin: str) -> None:
    options = Options(command=command, np=1)
    if not begin:
        run._require_text(options, variables)
        return
    with pytest.raises(OptionError, match=begin):
        run._require_text(options, variables)


def test_the_directory_must_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.fsencode(tmp_path / LATIN_1)
    os.mkdir(place)
    monkeypatch.chdir(os.fsdecode(place))
    with pytest.raises(OptionError, match=r"the present directory: .*caf\\udce9': must be UTF-8\."):
        run._require_text(Options(command=("python",), np=1), ())
