"""docs/settings.md has every setting, as the code has it."""

from __future__ import annotations

import re
import sys

import pytest
from documents import ROOT

sys.path.append(str(ROOT / "python" / "build"))

import settings_page
from settings_page import Row

PAGE = settings_page.PAGE.read_text()
CLASS = '''
class Thing(Base):
    """Does it.

    Args:
        pg: no setting.
        wait: how long, see docs/data.md; None: as TORCHFT_WAIT says (1 (on)).
        port: of :class:`torchft.Server`; default: a free
            one.
        retries: a number. ``0``: never.
        pause: between.

    Raises:
        ValueError: always.
    """

    def __init__(self, pg, wait: Optional[int] = None, port=None, *, retries: int = 3,
                 pause=timedelta(milliseconds=100)):
        pass
'''


def test_the_tables_are_those_of_the_code() -> None:
    assert settings_page.page(PAGE) == PAGE, "python python/build/settings_page.py writes them"


def test_every_variable_is_in_a_table() -> None:
    used = {
        name
        for folder, kind in (("torchft", "*.py"), ("go", "*.go"))
        for path in (ROOT / folder).rglob(kind)
        if not path.name.endswith("_test.go")
        for name in re.findall(r'"(TORCHFT_[A-Z_]*[A-Z])"', path.read_text())
    }
    assert {"TORCHFT_LIGHTHOUSE", "TORCHFT_TIMEOUT_SEC", "TORCHFT_LOG_LEVEL"} <= used
    rows = re.findall(r"^\| (.+?) \|", PAGE, re.MULTILINE)
    assert {name for name in used if not any(name in row for row in rows)} == set()


def test_the_manager_waits_for_a_quorum_longer_than_the_lighthouse_waits_for_groups() -> None:
    (quorum_timeout,) = re.findall(r"^\| `quorum_timeout`.*?\| (\d+) s \|", PAGE, re.MULTILINE)
    (join_timeout,) = re.findall(r"^\| `--join_timeout_ms` \| (\d+) \|", PAGE, re.MULTILINE)
    assert int(join_timeout) <= 1000 * int(quorum_timeout) / 2


def test_arguments_of_a_class() -> None:
    assert settings_page.of_class(CLASS, "Thing") == [
        Row("`wait`", "none", "how long, see [data](data.md)"),
        Row("`port`", "a free one", "of `torchft.Server`"),
        Row("`retries`", "3", "a number. `0`: never"),
        Row("`pause`", "100 ms", "between"),
    ]


def test_an_argument_without_a_docstring_is_named() -> None:
    with pytest.raises(ValueError, match=r"Thing\.retries is not in the docstring of Thing"):
        settings_page.of_class(CLASS.replace("retries:", "tries:", 1), "Thing")


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ('      --bind string   host:port (default "[::]:1")', Row("`--bind`", "[::]:1", "host:port")),
        (
            "      --eject int   how long (auto: ten (10)) (default auto)",
            Row("`--eject`", "auto", "how long (auto: ten (10))"),
        ),
        ("      --recover   begin anew", Row("`--recover`", "off", "begin anew")),
        (
            "      --least int   groups (required): all",
            Row("`--least`", "required", "groups (required): all"),
        ),
        ("  --every TIME    kill a group (environment: EVERY)", Row("`--every`", "EVERY", "kill a group")),
        ("  --seed SEED    of the choice", Row("`--seed`", "none", "of the choice")),
        ("  --replicas N[:MAX]    replica groups (2)", Row("`--replicas`", "2", "replica groups")),
        ("  --long N\n                  groups (0: none)", Row("`--long`", "0: none", "groups")),
    ],
)
def test_flags(line: str, row: Row) -> None:
    usage = f"usage: x [-h] [--bind X]\n\noptions:\n  -h, --help   show this and exit\n{line}\n"
    assert settings_page.of_help(usage) == [row]


def test_variables_and_the_arguments_that_they_set() -> None:
    source = (
        "#: `wait`, in seconds. Default: the\n#: argument's.\n"
        'A = "TORCHFT_A"\nB = "X"\n    #: More. Default: none.\n    "b": "TORCHFT_B",\n'
    )
    variables = settings_page.of_variables(source)
    assert list(variables) == ["TORCHFT_A", "TORCHFT_B"]
    both, others = settings_page.joined([Row("`wait`", "3 s", "how long")], variables)
    assert both == [Row("`wait`; TORCHFT_A, in seconds", "3 s", "how long")]
    assert others == [Row("TORCHFT_B", "none", "More")]
