"""Only edge.py detects the classes and abilities of clients, transports, process groups and works.

_extras.py detects those of a Manager. The code that uses their adapters, the code *behind the edge*, detects
none.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torchft

ROOT = Path(torchft.__file__).parent

# The code behind the edge. The implementations of process groups and transports do not count.
BEHIND = [
    *(ROOT / "_manager").rglob("*.py"),
    *(ROOT / "_quantization").glob("*.py"),
    *(ROOT / "local_sgd").glob("*.py"),
    *(ROOT / name for name in ("collectives.py", "ddp.py", "futures.py", "manager.py", "quantization.py")),
    *(ROOT / name for name in ("_wrapped_optimizer.py", "optim.py")),
]
EDGE = ROOT / "_manager" / "edge.py"

# Code behind the edge must not check whether an object is an instance of these classes.
FOREIGN = {
    "ProcessGroup",
    "Work",
    "_Work",
    "Future",
    "Manager",
    "ManagerClient",
    "CheckpointTransport",
    "Mock",
}

# Exceptions: file, code, reason.
ALLOWED = {
    ("_manager/step/background.py", "getattr(leaf, '_local_tensor', leaf)"): "only a DTensor has a local "
    "tensor",
    ("_manager/observe/hangs.py", "getattr(importlib.import_module('torch._C._distributed_c10d'), name)"): (
        "depends on how PyTorch was built"
    ),
    ("_manager/checks/audits.py", "hasattr(module, 'set_requires_gradient_sync')"): (
        "a model of the user that FSDP2 shards is refused"
    ),
    ("_manager/settings.py", "getattr(settings, name)"): "a field of the settings, by its name",
    ("_quantization/exchange.py", "getattr(pg, '_peers_now', lambda: pg)"): "public functions get any "
    "process group",
    ("_quantization/exchange.py", "hasattr(pg, 'getBackendName')"): "the same",
    ("_quantization/layout.py", "hasattr(tensor, 'to_local')"): "a DTensor of the user is refused",
    ("ddp.py", "getattr(self, '_bucket_config', None)"): "depends on the release of PyTorch",
    ("local_sgd/diloco.py", "hasattr(one, 'param_groups')"): "an argument that is no optimizer is named in "
    "the error",
    ("local_sgd/inner_steps.py", "hasattr(optimizer, 'register_step_post_hook')"): "the same",
    ("_wrapped_optimizer.py", "getattr(self.optim, name)"): "an attribute of the optimizer, by its name",
    ("_wrapped_optimizer.py", "hasattr(type(self), name)"): "whether an attribute is the wrapper's own",
    ("_wrapped_optimizer.py", "getattr(GradScaler, _name)"): "a method of PyTorch's, by its name",
}


def questions(file: Path) -> list[tuple[str, str]]:
    """Finds code of a file that detects classes or abilities: pairs of the file's path in the package and the
    code.
    """
    found = [node for node in ast.walk(ast.parse(file.read_text())) if asks(node)]
    return [(file.relative_to(ROOT).as_posix(), ast.unparse(node)) for node in found]


def asks(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name("hasattr" | "getattr" | "is_native" | "supports_reconfigure")):
            return True
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]):
            names = {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)}
            return bool(FOREIGN & (names | {n.attr for n in ast.walk(kinds) if isinstance(n, ast.Attribute)}))
        case ast.Compare(
            left=ast.Call(func=ast.Name("type")), ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq()]
        ):
            return ast.unparse(node.comparators[0]) != "torch.Tensor"
        case ast.Attribute(attr="__module__" | "__class__"):
            return True
    return False


def test_code_behind_the_edge_detects_no_abilities() -> None:
    asked = {question for file in BEHIND if file != EDGE for question in questions(file)}
    assert asked - ALLOWED.keys() == set(), "detect abilities in _manager/edge.py, where the Manager is made"
    assert ALLOWED.keys() - asked == set(), "these exceptions are no longer needed"


def test_the_edge_takes_what_an_object_lacks_from_one_place() -> None:
    """Except for what is detected when an object is set, and whether a transport is torchft's default."""
    tree = ast.parse(EDGE.read_text())
    methods = {
        f"{kind.name}.{method.name}"
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and any(asks(node) for node in ast.walk(method))
    }
    assert methods == {"Peers.pg", "Transport.own"}
