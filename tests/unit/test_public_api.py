"""All names in public_api.txt exist. It lists the names that users call, with their arguments and defaults.

In the list, names of a module are indented by two, names of a class by four. Further arguments may follow
those of the list if they have defaults. Modules that need another package have separate tests
(test_torchx.py, test_torchcomms.py, test_lightning.py, test_huggingface.py).
"""

from __future__ import annotations

import ast
import inspect
import socket
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

import pytest
import torch
from torch.distributed import ReduceOp

from torchft.manager import WorldSizeMode

NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "timedelta": timedelta,
    "socket": socket,
    "ReduceOp": ReduceOp,
    "WorldSizeMode": WorldSizeMode,
}
MODULES = {
    head: lines
    for head, *lines in (
        block.splitlines() for block in Path(__file__).with_name("public_api.txt").read_text().split("\n\n")
    )
}


@pytest.mark.parametrize("name", MODULES)
def test_all_public_names_exist_with_their_signatures(name: str) -> None:
    if name == "torchft.otel" and find_spec("opentelemetry") is None:
        pytest.skip("needs OpenTelemetry: pip install '.[otel]'")
    module = import_module(name)
    assert [
        problem for line, owner in owners(module, MODULES[name]) for problem in problems(line, owner)
    ] == []


def owners(module: ModuleType, lines: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields each line and the object that has it."""
    cls = None
    for line in lines:
        of_class = line.startswith("    ")
        yield line.strip(), cls if of_class else module
        if not of_class:
            cls = getattr(module, line.strip(), None)


def problems(line: str, owner: Any) -> Iterator[str]:
    name = line.partition("(")[0].partition(" = ")[0]
    if not hasattr(owner, name):
        yield f"{line}: there is none"
    elif " = " in line.partition("(")[0]:
        value = line.partition(" = ")[2]
        if getattr(owner, name) != eval(value, NAMESPACE):
            yield f"{line}: it is {getattr(owner, name)!r}"
    elif "(" in line:
        found = [
            p
            for p in inspect.signature(getattr(owner, name)).parameters.values()
            if p.name not in ("self", "cls")
        ]
        yield from (f"{line}: {what}" for what in differences(arguments(line), found))


def arguments(line: str) -> list[tuple[str, str | None]]:
    """Returns name and default of each argument."""
    function = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + [ast.unparse(d) for d in given.defaults]
    named = [(a.arg, d) for a, d in zip(given.args, defaults)]
    if given.vararg:
        named.append((given.vararg.arg, None))
    named += [(a.arg, d and ast.unparse(d)) for a, d in zip(given.kwonlyargs, given.kw_defaults)]
    return [*named, *([(given.kwarg.arg, None)] if given.kwarg else [])]


def differences(expected: list[tuple[str, str | None]], found: list[inspect.Parameter]) -> Iterator[str]:
    names = [name for name, _ in expected]
    if [p.name for p in found[: len(names)]] != names:
        yield f"it takes {[p.name for p in found]}"
        return
    for (name, default), parameter in zip(expected, found):
        if default is not None and parameter.default != eval(default, NAMESPACE):
            yield f"{name} is {parameter.default!r} by default"
    for more in found[len(names) :]:
        if more.default is more.empty and more.kind not in (more.VAR_POSITIONAL, more.VAR_KEYWORD):
            yield f"{more.name} has no default"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("missing()", "there is none"),
        ("f(a, c=1)", "it takes ['a', 'b', 'c']"),
        ("f(a, b, c=2)", "c is 1 by default"),
        ("f(a)", "b has no default"),
        ("K = 2", "it is 1"),
    ],
)
def test_a_difference_is_found(line: str, message: str) -> None:
    module = ModuleType("m")
    module.__dict__.update(f=lambda a, b, c=1: None, K=1)
    assert list(problems(line, module)) == [f"{line}: {message}"]
    assert not list(problems("f(a, b)", module))
