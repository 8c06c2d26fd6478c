"""Builds the kernels with the package, where a C++ compiler and torch are there; without them torch computes."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    def run(self) -> None:
        folder = Path("." if self.inplace else self.build_lib) / "caches" / "platform"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            runpy.run_path(str(Path(__file__).parent / "native" / "build.py"))["build"](folder.resolve())
        except Exception as error:
            print(f"no kernels: {getattr(error, 'stderr', '') or error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in Path(self.build_lib, "caches", "platform").glob("kernels-*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The extension stands for the libraries: it makes the wheel one of a platform.
setup(ext_modules=[Extension("caches.platform.kernels", [])], cmdclass={"build_ext": BuildKernels})
