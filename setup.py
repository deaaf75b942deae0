"""Builds the compiled module with CMake; everything else about the package stands in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


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


setup(ext_modules=[Extension("elasticstate._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
