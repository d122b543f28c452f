"""Copies and pickles of objects that hold a Manager, which belongs to one process and cannot be copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Dict, NoReturn, Tuple

import torch
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self


class Missing:
    """Stands in an unpickled object for a Manager or a process group.

    Args:
        owner: name of the object's class.
        remedy: what makes the object usable.
    """

    def __init__(self, owner: str, remedy: str) -> None:
        self._owner = owner
        self._remedy = remedy

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        self._raise()

    def _raise(self) -> NoReturn:
        raise RuntimeError(
            f"this {self._owner} was unpickled, and a pickle holds no Manager and no process group: "
            f"{self._remedy}"
        )

    def refuse_training(self, module: nn.Module) -> None:
        """Makes the forward pass of an unpickled module raise an error where gradients are recorded."""
        module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._raise()


class Copyable:
    """A base class: a copy has the same Manager, a pickle none.

    A subclass sets the class variables, and defines :meth:`_parts` and :meth:`_assemble`.
    """

    _of_this_process: ClassVar[Tuple[str, ...]]  # attributes that copies share, and pickles leave out
    _remedy: ClassVar[str]  # what makes an unpickled object usable

    def _parts(self) -> Dict[str, Any]:
        """The attributes of which an equal object can be assembled."""
        raise NotImplementedError(f"{type(self).__name__}._parts")

    def _assemble(self, parts: Dict[str, Any]) -> None:
        """Initializes an object with the parts of another one, in place of ``__init__``."""
        raise NotImplementedError(f"{type(self).__name__}._assemble")

    def __copy__(self) -> Self:
        return _assembled(type(self), self._parts())

    def __deepcopy__(self, memo: Dict[int, Any]) -> Self:
        parts = self._parts()
        for name in self._of_this_process:
            memo[id(parts[name])] = parts[name]
        return _assembled(type(self), copy.deepcopy(parts, memo))

    def __reduce_ex__(self, protocol: object) -> Any:
        parts = self._parts()
        for name in self._of_this_process:
            if parts[name] is not None:
                parts[name] = Missing(type(self).__name__, self._remedy)
        return _assembled, (type(self), parts)


def _assembled(kind: Any, parts: Dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made._assemble(parts)
    return made
