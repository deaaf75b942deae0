"""Builds the compiled module with CMake; everything else about the package stands in pyproject.toml."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

HAS_STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cmake = [sys.executable, "-m", "cmake"]
        source, build = Path(__file__).resolve().parent, Path(self.build_temp).resolve()
        prefix = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # --fresh: a cache left by another environment names tools that may be gone.
        configure = ["--fresh", "-S", source, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.run([*cmake, *configure], check=True)
        subprocess.run([*cmake, "--build", build, "--parallel"], check=True)
        subprocess.run([*cmake, "--install", build, "--prefix", prefix], check=True)


class CheckedMetadata(dist_info):
    """Pip asks for the metadata before it downloads dependencies: what the build lacks ends it here, in a second."""

    def run(self) -> None:
        missing = what_is_missing()
        if missing:
            sys.exit(
                f"elasticstate cannot be compiled: {missing}. Or install one of its wheels, which need no compiler."
            )
        super().run()


class StableWheel(bdist_wheel):
    """From Python 3.12 on, one wheel serves all later versions."""

    def finalize_options(self) -> None:
        if HAS_STABLE_ABI:
            self.py_limited_api = "cp312"
        super().finalize_options()


def what_is_missing() -> str:
    """Return what a build needs and this machine lacks, with what to install; empty if nothing."""
    named = os.environ.get("CXX", "")
    compilers = [shlex.split(named)] if named else [[name] for name in ("c++", "g++", "clang++")]
    found = [compiler for compiler in compilers if compiler and shutil.which(compiler[0])]
    if not found:
        what = f"CXX={named!r} names no program" if named else "there is no C++ compiler"
        return f"{what}. Install g++ 10 or later (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    program = "#include <version>\n#include <concepts>\nint main() {}\n"
    arguments = ["-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run([*found[0], *arguments], input=program, text=True, capture_output=True).returncode:
        return f"the compiler {found[0][0]!r} does not know C++20. Install g++ 10 or later, and name it with CXX"
    if not (shutil.which("make") or shutil.which("ninja")):
        return "there is no make. Install it (Debian, Ubuntu: apt install make; Fedora: dnf install make)"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return (
            f"{headers} has no Python.h. Install the headers of this Python (Debian, Ubuntu: apt install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return ""


def long_description() -> str:
    """Return README with absolute links: a package index shows it without the files beside it."""
    source = "https://github.com/elasticstate/elasticstate/blob/main/"
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{source}", Path(__file__).with_name("README.md").read_text("utf-8"))


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("elasticstate._native", sources=[], py_limited_api=HAS_STABLE_ABI)],
    cmdclass={"build_ext": CMakeBuild, "dist_info": CheckedMetadata, "bdist_wheel": StableWheel},
)
