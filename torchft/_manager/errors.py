"""What the Manager keeps of an error."""

from __future__ import annotations

import traceback


class ExceptionWithTraceback(Exception):
    """An exception with its traceback as text, so that it says where it came from on another thread."""

    def __init__(self, e: Exception) -> None:
        super().__init__(e)
        self.original_exception = e
        self.stack_trace: str = "".join(traceback.format_exception(type(e), e, e.__traceback__))

    def __str__(self) -> str:
        return f"{self.original_exception}\n{self.stack_trace}"
