"""When this process had its interpreter: to be imported before what takes time."""

from __future__ import annotations

import time

AT = time.monotonic()  # a clock that all processes of a machine share
