"""Checks that a command's program knows its targets, flags, extras and files. Runs --help only."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from documents import ROOT

# Programs of other projects. Of their arguments, only files of this repository are checked.
FOREIGN = {
    "cat",
    "cd",
    "curl",
    "export",
    "kill",
    "kubectl",
    "mkdir",
    "openssl",
    "sacct",
    "sbatch",
    "scancel",
    "scontrol",
    "sed",
    "show",
    "srun",
    "torchx",
}
FOREIGN |= {"docker", "git", "source", "umask", "wait"}

# Modules that an example needs and that may be missing. Its argument parser does not need them.
OPTIONAL = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")


class Unknown(AssertionError):
    """The command uses something that its program does not know."""


def check(command: str) -> None:
    """Raises Unknown, with the unknown part."""
    first_line = command.split("\n", 1)[0]
    for part in re.split(r"&&|\|\||[;|]|&(?!\d)", re.sub(r"\$\([^)]*\)", "X", first_line)):
        words = shlex.split(re.sub(r"\d?>&?\s*\S+|<<?\S*", "", part), comments=True)
        while words and re.fullmatch(r"[\w]+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words and not re.fullmatch(r"\w+\(\)", words[0]) and words[0] not in "{}":
            _check(words)


def _check(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        _make(rest)
    elif program in ("python", "python3"):
        if rest[:2] == ["-m", "torchft.launch.agent"]:
            _torchrun(rest[2:])
        elif rest[0] == "-m":
            _flags(f"python -m {rest[1]}", _help_of_module(rest[1]), rest[2:])
        elif rest[0] != "-c":
            _script(rest)
    elif program == "torchrun":
        _torchrun(rest)
    elif program == "torchft_lighthouse" or words[:2] == ["torchft", "lighthouse"]:
        _flags(program, _help_of_the_lighthouse(), [word for word in rest if word != "lighthouse"])
    elif program == "torchft":
        _torchft(rest)
    elif program == "go":
        _go(rest)
    elif program == "pip":
        _pip(rest)
    elif program not in FOREIGN:
        raise Unknown(f"what is {program!r}?")
    for word in rest:
        if word.startswith(("python/", "docs/", "tests/")) and not (ROOT / word).exists():
            raise Unknown(f"there is no {word}")


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets, variables = re.findall(r"^([\w-]+):", text, re.M), re.findall(r"^(\w+) \?=", text, re.M)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (variables if equals else targets) and name != "-k":
            raise Unknown(f"make knows no {word!r}")


def _script(words: list[str]) -> None:
    path = ROOT / words[0]
    if not path.is_file():
        raise Unknown(f"there is no {words[0]}")
    _flags(words[0], _help_of_script(path), words[1:])


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options_alone = "-m" not in words and not any(word.endswith(".py") for word in words)  # in running text
    try:
        args = get_args_parser().parse_args([*words, "SCRIPT"] if options_alone else words)
    except SystemExit as e:
        raise Unknown(f"torchrun does not take {words}") from e
    if args.no_python:
        _check([args.training_script, *args.training_script_args])
    elif not args.module and not options_alone:
        _script([args.training_script, *args.training_script_args])


def _torchft(words: list[str]) -> None:
    from torchft.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        if main([words[0], "--help"]) == 2:
            raise Unknown(f"torchft knows no {words[0]!r}")
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    _flags(f"torchft {words[0]}", output.getvalue(), words[1:script])
    if script < len(words) and (ROOT / words[script]).is_file():
        _script(words[script:])


def _go(words: list[str]) -> None:
    of_go = {"-run", "-bench", "-benchtime", "-timeout", "-v", "-race", "-count"}
    tests = "".join(path.read_text() for path in (ROOT / "go/sim").rglob("*_test.go"))
    ours = set(re.findall(r'flag\.\w+\("(\w+)"', tests))
    for word in words:
        if re.fullmatch(r"-[a-z]+", word) and word not in of_go and word[1:] not in ours:
            raise Unknown(f"go knows no {word}")
        if word.startswith("./") and not (ROOT / "go" / word).exists() and word != "./...":
            raise Unknown(f"there is no go/{word}")


def _pip(words: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^([\w-]+) = \[", text[text.index("[project.optional-dependencies]") :], re.M)
    for names in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        for name in names.split(","):
            if name not in extras:
                raise Unknown(f"there is no extra {name!r}; there are {extras}")


def _flags(program: str, help_text: str, words: list[str]) -> None:
    known = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text)}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if re.fullmatch(r"--?[a-z][\w-]*", flag) and flag not in known:
            raise Unknown(f"{program} knows no {word}")


@lru_cache
def _help_of_script(path: Path) -> str:
    """Runs a script's --help in this process, where torch is imported already. Other modules may be missing.

    Empty for a script without an argument parser, which would begin to train.
    """
    if "parse_args" not in path.read_text():
        return ""
    absent = {name: mock.MagicMock() for name in OPTIONAL if find_spec("ray") is None}
    output, before = io.StringIO(), (sys.argv, list(sys.path))
    sys.argv, sys.path[:0] = [str(path), "--help"], [str(path.parent), str(ROOT)]
    sys.modules.update(absent)
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
        for name in absent:
            del sys.modules[name]
    return output.getvalue()


@lru_cache
def _help_of_module(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    return done.stdout


@lru_cache
def _help_of_the_lighthouse() -> str:
    code = (
        "import sys; sys.argv[1:] = ['--help']; from torchft._torchft import lighthouse_main as main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    return done.stdout + done.stderr
