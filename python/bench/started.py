"""The time at which the interpreter of this process was ready. Import it before slow modules."""

from __future__ import annotations

import time

AT = time.monotonic()  # a clock that all processes of a machine share
