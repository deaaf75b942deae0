"""The programs of native/tests, built for a sanitizer or for coverage. Each must exit with 0 and without a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CMAKE = [sys.executable, "-m", "cmake"]
REPORT = re.compile(r"ERROR: \w*Sanitizer|WARNING: \w*Sanitizer|runtime error:")
STRICT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program that must exit with 0. Return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | STRICT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-10_000:]}"
    return done.stdout


def build(folder: Path, sanitize: str) -> list[Path]:
    """Build the test programs for this sanitizer."""
    run(*CMAKE, "-S", REPOSITORY, "-B", folder, "-DELASTICSTATE_TESTS=ON", f"-DELASTICSTATE_SANITIZE={sanitize}")
    run(*CMAKE, "--build", folder, "--parallel")
    programs = sorted((folder / "programs").iterdir())
    expected = {source.stem for source in (REPOSITORY / "native" / "tests").glob("test_*.cpp")}
    assert {program.name for program in programs} == expected
    return programs


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_a_sanitizer_finds_nothing(tmp_path: Path, sanitize: str) -> None:
    for program in build(tmp_path, sanitize):
        output = run(program)
        assert not REPORT.search(output), f"{program.name}:\n{output}"


def test_sanitizers_would_find_something(tmp_path: Path) -> None:
    """Check that the sanitizers detect a known fault. Otherwise a run without reports proves nothing."""
    faults = {
        "address,undefined": "int main(int n, char **) { int *p = new int[2]; delete[] p; return p[n]; }",
        "thread": "#include <thread>\nint x; int main() { std::thread t([] { x = 1; }); x = 2; t.join(); return 0; }",
    }
    for sanitize, source in faults.items():
        (tmp_path / "fault.cpp").write_text(source)
        compiler = os.environ.get("CXX", "c++")
        run(compiler, "-g", "-pthread", f"-fsanitize={sanitize}", "fault.cpp", "-o", "fault", cwd=tmp_path)
        with pytest.raises(AssertionError, match="Sanitizer"):
            run(tmp_path / "fault")


def test_how_much_of_the_code_the_programs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in build(tmp_path, "coverage"):
        run(program)
    notes = sorted((tmp_path / "CMakeFiles").rglob("*.gcno"))
    found = line_coverage(run("gcov", "--no-output", *notes, cwd=tmp_path))
    sources = {path.name for path in (REPOSITORY / "native").glob("*.cpp") if not path.name.startswith("bind")}
    assert set(found) >= sources
    with capsys.disabled():
        print("\nlines of native/ that its own test programs run:")
        for name, (percent, lines) in sorted(found.items()):
            print(f"  {name:<20} {percent:6.1f} % of {lines}")
    assert {name for name, (percent, _) in found.items() if percent < 50} == set()


def line_coverage(gcov: str) -> dict[str, tuple[float, int]]:
    """Return percent and number of lines for each file of native/ without tests. Keeps the best of several figures."""
    found: dict[str, tuple[float, int]] = {}
    for name, percent, lines in re.findall(r"File '(.+)'\nLines executed:([\d.]+)% of (\d+)", gcov):
        path = Path(name)
        if path.parent == REPOSITORY / "native":
            found[path.name] = max(found.get(path.name, (0.0, 0)), (float(percent), int(lines)))
    return found
