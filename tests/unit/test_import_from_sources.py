"""An import of the sources, whose native module is not compiled, instead of the installed package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import elasticstate


def test_the_error_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    sources = Path(elasticstate.__path__[0])
    copy = shutil.copytree(sources, tmp_path / "elasticstate", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # An editable installation finds the native module where pip has put it.
    program = (
        "import sys; sys.meta_path = [each for each in sys.meta_path if 'editable' not in repr(each).lower()]; "
        "import elasticstate; elasticstate.TorchState()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"elasticstate.errors.UsageError: elasticstate was imported from {copy}, where its native module is not "
        "compiled. Move the script out of the folder of the sources, or compile the module there with pip install -e ."
    )
    assert "importlib" not in ended.stderr
