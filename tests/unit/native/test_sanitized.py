"""The programs of native/tests, built for a sanitizer or for coverage. Each must exit with 0 and without a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def build(folder: Path, *options: str, having: str = "") -> list[Path]:
    """Build the test programs with these options of CMakeLists.txt. ``having``: a word in the source of each."""
    run(*CMAKE, "-S", REPOSITORY, "-B", folder, "-DELASTICSTATE_TESTS=ON", *options)
    run(*CMAKE, "--build", folder, "--parallel")
    programs = sorted((folder / "programs").iterdir())
    sources = (REPOSITORY / "native" / "tests").glob("test_*.cpp")
    expected = {source.stem for source in sources if having in source.read_text()}
    assert {program.name for program in programs} == expected
    return programs


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Folder and programs of one build for two tests: it finds wrong addresses, and counts the lines that run."""
    folder = tmp_path_factory.mktemp("addresses")
    return folder, build(folder, "-DELASTICSTATE_SANITIZE=address,undefined", "-DELASTICSTATE_COVERAGE=ON")


def finds_nothing(programs: list[Path]) -> None:
    with ThreadPoolExecutor(3) as threads:  # some of them wait most of the time
        for program, output in zip(programs, threads.map(run, programs), strict=True):
            assert not REPORT.search(output), f"{program.name}:\n{output}"


def test_the_sanitizers_of_addresses_and_of_undefined_behaviour_find_nothing(
    addresses: tuple[Path, list[Path]],
) -> None:
    finds_nothing(addresses[1])


def test_the_sanitizer_of_threads_finds_nothing(tmp_path: Path) -> None:
    finds_nothing(build(tmp_path, "-DELASTICSTATE_SANITIZE=thread", having="thread"))


def test_sanitizers_would_find_something(tmp_path: Path) -> None:
    """Check that the sanitizers detect a known fault. Otherwise a run without reports proves nothing."""
    faults = {
        "address,undefined": "int main(int n, char **) { int *p = new int[2]; delete[] p; return p[n]; }",
        # One write after the other, as the sanitizer misses two writes at the very same time.
        "thread": "#include <thread>\n#include <unistd.h>\n"
        "int x; int main() { std::thread t([] { x = 1; }); usleep(200'000); x = 2; t.join(); return 0; }",
    }
    for sanitize, source in faults.items():
        (tmp_path / "fault.cpp").write_text(source)
        compiler = os.environ.get("CXX", "c++")
        run(compiler, "-g", "-pthread", f"-fsanitize={sanitize}", "fault.cpp", "-o", "fault", cwd=tmp_path)
        with pytest.raises(AssertionError, match="Sanitizer"):
            run(tmp_path / "fault")


def test_how_much_of_the_code_the_programs_run(
    addresses: tuple[Path, list[Path]], record_property: Callable[[str, object], None]
) -> None:
    folder, programs = addresses
    notes = sorted((folder / "CMakeFiles").rglob("*.gcno"))
    if not list((folder / "CMakeFiles").rglob("*.gcda")):  # this test runs without the one before
        finds_nothing(programs)
    found = line_coverage(run("gcov", "--no-output", *notes, cwd=folder))
    sources = {path.name for path in (REPOSITORY / "native").glob("*.cpp") if not path.name.startswith("bind")}
    assert set(found) >= sources
    rows = (f"  {name:<20} {percent:6.1f} % of {lines}" for name, (percent, lines) in sorted(found.items()))
    record_property("report", "\n".join(("lines of native/ that its own test programs run:", *rows)))
    assert {name for name, (percent, _) in found.items() if percent < 50} == set()


def line_coverage(gcov: str) -> dict[str, tuple[float, int]]:
    """Return percent and number of lines for each file of native/ without tests. Keeps the best of several figures."""
    found: dict[str, tuple[float, int]] = {}
    for name, percent, lines in re.findall(r"File '(.+)'\nLines executed:([\d.]+)% of (\d+)", gcov):
        path = Path(name)
        if path.parent == REPOSITORY / "native":
            found[path.name] = max(found.get(path.name, (0.0, 0)), (float(percent), int(lines)))
    return found
