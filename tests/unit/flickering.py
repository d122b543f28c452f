"""An attribute that another thread clears at the worst moment."""

from __future__ import annotations

from typing import Any


def cleared_after_each_look(kind: type, name: str) -> type:
    """A subclass in which an attribute is None after each look at it, as if another thread had cleared it
    then.
    """

    def look(self: Any) -> Any:
        return self.__dict__.pop(name, None)

    def store(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return type(kind.__name__, (kind,), {name: property(look, store)})
