"""Builds the two native libraries, for CPython's stable ABI (python/build/compilation.py). Everything else is
in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python" / "build"))
import compilation  # noqa: E402
import toolchain  # noqa: E402

GO_LIBRARY = "torchft._torchft_go"
C_LIBRARY = "torchft.process_group.isolated._native"


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        compilation.build(Path(self.get_ext_fullpath(ext.name)).resolve(), go=ext.name == GO_LIBRARY)


options: dict[str, dict[str, str]] = {"bdist_wheel": {"py_limited_api": "cp310"}}
try:
    if {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"} & set(sys.argv):
        toolchain.check()
        toolchain.go()
        toolchain.compiler()
    if machine := toolchain.wheel_for():
        glibc = "_".join(map(str, toolchain.GLIBC))
        options["bdist_wheel"]["plat_name"] = f"manylinux_{glibc}_{machine}"
except toolchain.Missing as missing:
    sys.exit(str(missing))
# Until this process ends: no file of an earlier build gets into a wheel.
scratch = tempfile.TemporaryDirectory()
options["build"] = {"build_base": scratch.name}
if not os.access(ROOT, os.W_OK):
    options["egg_info"] = {"egg_base": scratch.name}

setup(
    ext_modules=[Extension(name, sources=[], py_limited_api=True) for name in (GO_LIBRARY, C_LIBRARY)],
    cmdclass={"build_ext": Build},
    options=options,
)
