"""csrc/Python.h, with which the libraries are built, says the same as CPython's own header."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = (CSRC / "Python.h").read_text()
STRUCTS = ("PyMethodDef", "PyModuleDef")
FLAGS = re.findall(r"^#define (METH_\w+) ", HEADER, re.MULTILINE)

# After CPython's header, ours: another type of a function is an error. What both define has another name.
COMPARED = """
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <stddef.h>
#include "{theirs}"
{kept}
enum {{ {flags} }};
#undef Py_PYTHON_H
#define PyMethodDef OurMethodDef
#define PyModuleDef OurModuleDef
#define PyModuleDef_Base OurModuleDef_Base
#define PyModule_Create2 our_create
#define PyModule_AddFunctions our_add
{undefined}
#include "{ours}"
{asserted}
"""


def fields(struct: str) -> list[str]:
    (body,) = re.findall(rf"^typedef struct {struct} \{{(.*?)^\}}", HEADER, re.MULTILINE | re.DOTALL)
    return re.findall(r"(\w+);", body)


def test_it_agrees_with_cpythons() -> None:
    theirs, compiler = Path(sysconfig.get_paths()["include"]) / "Python.h", shutil.which("gcc")
    if not theirs.exists() or compiler is None:
        pytest.skip("needs gcc and the headers of Python")
    same = [f"Their_{flag} == {flag}" for flag in FLAGS]
    for struct in STRUCTS:
        same.append(f"sizeof(Their_{struct}) == sizeof({struct})")
        same += [
            f"offsetof(Their_{struct}, {field}) == offsetof({struct}, {field})" for field in fields(struct)
        ]
    assert len(same) > 15
    program = COMPARED.format(
        theirs=theirs,
        ours=CSRC / "Python.h",
        kept="\n".join(f"typedef {struct} Their_{struct};" for struct in STRUCTS),
        flags=", ".join(f"Their_{flag} = {flag}" for flag in FLAGS),
        undefined="\n".join(
            f"#undef {name}" for name in re.findall(r"^#define (Py\w+|METH_\w+)", HEADER, re.MULTILINE)
        ),
        asserted="\n".join(f'_Static_assert({each}, "{each}");' for each in same),
    )
    command = [compiler, "-std=c11", "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", [path.name for path in CSRC.glob("*.c")])
def test_it_declares_all_that_the_sources_use(source: str) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    done = subprocess.run(
        [compiler, "-Wall", "-Werror", "-fsyntax-only", f"-I{CSRC}", CSRC / source],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_python_has_all_that_it_declares() -> None:
    names = set(re.findall(r"\b(_?Py\w+)\(", re.sub(r"^#.*|\(\*.*", "", HEADER, flags=re.MULTILINE)))
    names |= set(re.findall(r"\b(PyExc_\w+|_Py_NoneStruct)\b", HEADER))
    assert len(names) > 30
    assert {name for name in names if not hasattr(ctypes.pythonapi, name)} == set()
