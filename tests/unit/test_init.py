"""The names of `import torchft`, and the modules that it loads."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import torchft


def loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["torchft", "torchft.coordination", "torchft._torchft", "torchft.addresses", "torchft.scaling"]
)
def test_importing_the_control_plane_loads_neither_torch_nor_the_library(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert module in loaded
    assert not loaded & {"torch", "numpy", "torchft._torchft_go"}


@pytest.mark.parametrize("module", ["torchft.data.position", "torchft.data.agreement"])
def test_the_samples_of_a_step_are_computed_without_torch(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"torch", "numpy"}


def test_a_restarted_group_does_not_import_optional_packages() -> None:
    """Triton alone takes as long to import as all of torchft."""
    loaded = loaded_after("from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo")
    assert "torchft.manager" in loaded
    assert not loaded & {"triton", "opentelemetry", "torchft.otel"}


def test_exports_are_the_objects_of_their_modules() -> None:
    from torchft import data, ddp, manager, optim, process_group

    assert torchft.Manager is manager.Manager
    assert torchft.Optimizer is optim.OptimizerWrapper
    assert torchft.DistributedDataParallel is ddp.DistributedDataParallel
    assert torchft.DistributedSampler is data.DistributedSampler
    assert torchft.ProcessGroupBabyNCCL is process_group.ProcessGroupBabyNCCL
    assert torchft.ProcessGroupBabyXCCL is process_group.ProcessGroupBabyXCCL
    assert torchft.ProcessGroupGloo is process_group.ProcessGroupGloo
    assert torchft.ProcessGroupNCCL is process_group.ProcessGroupNCCL
    assert torchft.ProcessGroupXCCL is process_group.ProcessGroupXCCL
    for name in torchft.__all__:
        assert getattr(torchft, name).__name__
        assert name in dir(torchft)


def test_exports_are_pinned() -> None:
    assert torchft.__all__ == [
        "DistributedDataParallel",
        "DistributedSampler",
        "Job",
        "Manager",
        "Optimizer",
        "ProcessGroupBabyNCCL",
        "ProcessGroupBabyXCCL",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupXCCL",
    ]


def test_star_import() -> None:
    namespace: dict[str, object] = {}
    exec("from torchft import *", namespace)
    assert set(torchft.__all__) <= set(namespace)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchft' has no attribute 'Nope'"):
        _ = torchft.Nope
    assert not hasattr(torchft, "Nope")


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.\w+)?", torchft.__version__)
