"""csrc/isolated.c and csrc/ending.c"""

def copy(to: int, source: int, size: int, /) -> None:
    """Copies memory between two addresses. During a large copy, other threads of Python run."""

def stop_threads_that_come_back() -> None:
    """Makes a thread that returns from C++ while the interpreter ends sleep, so that it does not abort the
    process.
    """
