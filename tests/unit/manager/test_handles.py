"""Texts in the reconfigure handles of peers."""

from __future__ import annotations

import pytest

from torchft._manager.handles import COMPARES, CONNECTIONS, LAYOUT, announce, announce_native, announced, bare


@pytest.mark.parametrize("handle", ['{"id": "a"}', "native", "{no json", '{"torchft_compares": 3}', ""])
def test_a_handle_that_announces_nothing(handle: str) -> None:
    assert announced(handle, COMPARES) == ""


def test_texts_in_a_handle_of_torchft() -> None:
    handle = announce(announce('{"id": "a"}', COMPARES, "1/10"), CONNECTIONS, "a/2//0")
    assert handle == '{"id": "a", "torchft_compares": "1/10", "torchft_connections": "a/2//0"}'
    assert announced(handle, COMPARES) == "1/10" and announced(handle, CONNECTIONS) == "a/2//0"
    assert announce('{"id": "a"}', COMPARES, "") == '{"id": "a"}'


def test_the_handle_of_another_project_stays_as_it_is() -> None:
    assert announce("another project's", COMPARES, "1/10") == "another project's"


def test_texts_after_a_native_handle_are_removed_before_pytorch_gets_it() -> None:
    native = "a:native:handle with spaces"
    for handle in (
        announce_native(native, COMPARES, "1/10"),
        announce_native(native, LAYOUT, "loader-1234"),
        announce_native(announce_native(native, COMPARES, "1/10"), LAYOUT, "loader-1234"),
        announce_native(native, COMPARES, ""),
    ):
        assert bare(handle) == native
    assert announced(announce_native(native, LAYOUT, "loader-1234"), COMPARES) == ""
    both = announce_native(announce_native(native, COMPARES, "1/10"), LAYOUT, "loader-1234")
    assert announced(both, COMPARES) == "1/10" and announced(both, LAYOUT) == "loader-1234"
