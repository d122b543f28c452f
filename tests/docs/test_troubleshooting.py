"""The messages of docs/troubleshooting.md are those of the sources."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from documents import ROOT

MESSAGES = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def as_written(source: str) -> str:
    """A source file with the pieces of its strings put together, and quotes in them as they print."""
    joined = re.sub(r'"\s*(?:\+\s*)?f?"', "", source)
    return joined.replace('\\"', '"')


@lru_cache
def sources() -> list[str]:
    files = [*(ROOT / "torchft").rglob("*.py"), *(ROOT / "go").rglob("*.go")]
    return [as_written(path.read_text()) for path in files if not path.name.endswith("_test.go")]


def known(message: str, texts: list[str]) -> bool:
    """Whether one of the texts has all parts of the message, in their order, with short gaps."""
    gap = r"[^\n]{0,120}?"
    pattern = gap.join(re.escape(part.strip()) for part in message.split("…"))
    return any(re.search(pattern, text) for text in texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_one_of_ours(message: str) -> None:
    assert len(message.replace("…", "").strip()) > 10, "too short to be found by"
    # Names that are constants in the source stand as themselves in the document.
    texts = [text.replace("{LIGHTHOUSE_ENV}", "TORCHFT_LIGHTHOUSE") for text in sources()]
    assert known(message, texts)


def test_a_message_that_nobody_writes_is_found_out() -> None:
    texts = [as_written('raise ValueError(\n    f"{a} of {b} asked, "\n    "too few"\n)')]
    assert known("… of … asked, too few", texts)
    assert not known("… of … asked, too many", texts)
    assert len(MESSAGES) > 20
