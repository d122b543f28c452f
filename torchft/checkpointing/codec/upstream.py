"""The parts of a state as upstream's Manager names them."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree

# Names of the main part of the user's state. Upstream uses the first if its Manager's constructor got the
# functions of the state, and the second if set_state_dict_fns did (measured: 0.2.0 and a nightly of
# 2026-10-26). This package always uses the first.
MAIN_PARTS = ("default", "set_state_dict_fns")
_AFTER = "after "  # prefix of the keys that hold the padding after a main part


def with_main_parts(state: Any, num_chunks: int) -> Any:
    """Returns the state of a Manager with its main part under all names, so that targets of any version find
    it.

    A stream contains each storage once, so the leaves of a part must be in the same chunks under all its
    names. Padding achieves that. The target ignores the padding, like every name that it does not know.
    """
    user = state.get("user") if isinstance(state, dict) else None
    if not isinstance(user, dict):
        return state
    given = [key for key in MAIN_PARTS if key in user]
    if len(given) != 1:
        return state
    leaves = pytree.tree_structure(user[given[0]]).num_leaves
    parts = {}
    for key, part in user.items():
        if key not in given:
            parts[key] = part
            continue
        for name in sorted(MAIN_PARTS, key=lambda name: name != key):  # the source's own name first
            parts[name] = part
            parts[_AFTER + name] = [0] * (-leaves % max(1, num_chunks))
    return {**state, "user": parts}


def without_other_names(state: Any) -> Any:
    """Undoes :func:`with_main_parts`; any other state is returned unchanged."""
    user = state.get("user") if isinstance(state, dict) else None
    if not isinstance(user, dict):
        return state
    names = [key[len(_AFTER) :] for key in user if str(key).startswith(_AFTER)]
    if len(names) != len(MAIN_PARTS):
        return state
    dropped = {*names[1:], *(_AFTER + name for name in names)}
    return {**state, "user": {key: part for key, part in user.items() if key not in dropped}}
