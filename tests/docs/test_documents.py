"""The search for commands in a document, as tables."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, Command, block_commands, blocks, commands, indented_commands, words
from programs import Unknown, check

PAGE = """\
# Title

Type `make train`, or `torchft status
--watch`; `make` alone is no command, nor is `x = 1`.

## Part

```sh
first --flag   # what it does
# a remark
second \\
  --more
cat > file <<END
one # kept
END
```

```python
print("no command")
```
"""


def test_blocks_know_their_heading_and_language() -> None:
    found = blocks("page.md", PAGE)
    assert [(b.heading, b.language) for b in found] == [("Part", "sh"), ("Part", "python")]
    assert found[1].text == 'print("no command")\n'


def test_commands_of_a_page() -> None:
    assert commands("page.md", PAGE) == [
        Command("page.md", "first --flag"),
        Command("page.md", "second --more"),
        Command("page.md", "cat > file <<END\none # kept\nEND"),
        Command("page.md", "make train", inline=True),
        Command("page.md", "torchft status --watch", inline=True),
    ]


def test_in_a_console_block_only_lines_after_the_prompt_are_commands() -> None:
    assert block_commands("$ make train\ngroup 0 trains\n$ make test\n", console=True) == [
        "make train",
        "make test",
    ]


def test_commands_in_indented_blocks_are_found_so_that_they_can_be_refused() -> None:
    assert indented_commands("text\n\n    make train\n    other\n") == ["make train"]


def test_words_to_read() -> None:
    page = PAGE + "\n![a picture](a.png) [two words](b.md#c)\n\n| three | more `words` |\n|---|---|\n"
    title_sentence_part_link = 1 + 16 + 1 + 2
    assert words(page, tables=False) == title_sentence_part_link
    assert words(page, tables=True) == title_sentence_part_link + 3


@pytest.mark.parametrize(
    "command",
    [
        "make train",
        "make soak SOAK=1h",
        "python python/bench/run.py step --rounds 40",
        "A=1 B=2 torchrun --standalone --nproc_per_node 1 train_ddp.py --steps 20 & first=$!",
        "torchft_lighthouse --min_replicas 1 --heartbeat-timeout-ms=1000",
        "torchft run --replicas 2 train_ddp.py --steps 5000",
        "cd go && go test ./sim -seed 7 -lines 99 -v",
        "pip install -e '.[train]'",
    ],
)
def test_known_commands(command: str) -> None:
    check(command)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("make trian", "make knows no 'trian'"),
        ("make soak SAOK=1h", "make knows no 'SAOK=1h'"),
        ("python python/bench/run.py step --round 40", "knows no --round"),
        ("python python/bench/walk.py", "there is no python/bench/walk.py"),
        ("torchrun --nprocs_per_node 1 train_ddp.py", "torchrun does not take"),
        ("torchrun --nproc_per_node 1 train_ddp.py --stepps 20", "train_ddp.py knows no --stepps"),
        ("torchft_lighthouse --min_replica 1", "knows no --min_replica"),
        ("torchft statsu", "torchft knows no 'statsu'"),
        ("torchft run --replica 2 train_ddp.py", "torchft run knows no --replica"),
        ("torchft run --replicas 2 train_ddp.py --stepps 5", "train_ddp.py knows no --stepps"),
        ("cd go && go test ./sim -sed 7", "go knows no -sed"),
        ("pip install '.[rai]'", "there is no extra 'rai'"),
        ("frobnicate", "what is 'frobnicate'?"),
    ],
)
def test_unknown_commands(command: str, why: str) -> None:
    with pytest.raises(Unknown) as e:
        check(command)
    assert why in str(e.value)


def test_nothing_says_to_install_the_other_project() -> None:
    """`pip install torchft` fetches upstream; this package is installed from its folder: `pip install
    '.[otel]'`.
    """
    files = [path for path in ROOT.glob("*.*") if path.suffix in (".md", ".py", ".toml")]
    for folder in ("docs", "python", "torchft"):
        files += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".md", ".py", ".sh", ".yaml", ".toml")
        ]
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?torchft\b(?!\.)")
    assert wrong.search("pip install 'torchft[otel]'")
    assert [path for path in files if wrong.search(path.read_text())] == []
