"""Checks of the Dockerfile without Docker, beyond those of hadolint (`make lint`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
from documents import ROOT, commands, documents
from programs import check

LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
# Files that the Dockerfile copies from the repository, to the same path.
COPIED = [source for line in LINES if line.startswith("COPY ") for source in line.split()[1:-1]]
DOCKER = [
    command.text
    for document, text in documents().items()
    for command in commands(document, text)
    if command.text.startswith("docker ")
]


def test_copied_files_exist_and_no_others_are_in_the_context() -> None:
    assert [source for source in COPIED if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(COPIED)


def test_its_arguments_match_the_page() -> None:
    declared = {line.split()[1].partition("=")[0] for line in LINES if line.startswith("ARG ")}
    page = documents()["docs/deploy.md"]
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == declared
    builds = [command for command in DOCKER if command.startswith("docker build ")]
    assert builds and set(re.findall(r"--build-arg (\w+)=", " ".join(builds))) <= declared


def test_commands_that_are_run_in_it_are_known() -> None:
    runs = [re.split(r" torchft:\w+ (?=\w)", command, maxsplit=1) for command in DOCKER if " run " in command]
    assert runs and all(len(parts) == 2 for parts in runs)
    for _, command in runs:
        check(command)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_copied_files_suffice_for_the_wheel(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for source in COPIED:
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
        else:
            shutil.copy2(ROOT / source, tmp_path / source)
    recipe = next(line for line in LINES if " pip wheel " in line).removeprefix("RUN python3 ")
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)  # one that uv made has no pip
    command = [environment / "bin" / "python", *recipe.replace(" /dist ", f" {tmp_path / 'dist'} ").split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("torchft-*-cp310-abi3-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT)) for kind in ("*.py", "*.pyi") for path in (ROOT / "torchft").rglob(kind)
    }
    assert (
        wanted | {"torchft/_torchft_go.abi3.so", "torchft/process_group/isolated/_native.abi3.so"} <= packed
    )
