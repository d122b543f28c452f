"""Each message in docs/troubleshooting.md occurs in the sources."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from documents import ROOT

MESSAGES = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def as_written(source: str) -> str:
    """Returns the text of a source file with adjacent string literals joined and quotes unescaped."""
    joined = re.sub(r'"\s*(?:\+\s*)?f?"', "", source)
    return joined.replace('\\"', '"')


@lru_cache
def sources() -> list[str]:
    files = [*(ROOT / "torchft").rglob("*.py"), *(ROOT / "go").rglob("*.go")]
    return [as_written(path.read_text()) for path in files if not path.name.endswith("_test.go")]


def known(message: str, texts: list[str]) -> bool:
    """Whether one of the texts contains all parts of the message, in order and with short gaps."""
    gap = r"[^\n]{0,120}?"
    pattern = gap.join(re.escape(part.strip()) for part in message.split("…"))
    return any(re.search(pattern, text) for text in texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_one_of_ours(message: str) -> None:
    assert len(message.replace("…", "").strip()) > 10, "too short to identify a message"
    # The page shows the value of a constant that the source names.
    texts = [text.replace("{LIGHTHOUSE_ENV}", "TORCHFT_LIGHTHOUSE") for text in sources()]
    assert known(message, texts)


def test_a_message_that_no_source_contains_is_noticed() -> None:
    texts = [as_written('raise ValueError(\n    f"{a} of {b} asked, "\n    "too few"\n)')]
    assert known("… of … asked, too few", texts)
    assert not known("… of … asked, too many", texts)
    assert len(MESSAGES) > 10
