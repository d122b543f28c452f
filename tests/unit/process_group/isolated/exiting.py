"""A group whose worker ends without an error message, as if the kernel had killed it when memory ran out."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from torchft.process_group import ProcessGroupBabyGloo

# The fork server runs `python -c`, and workers are its children.
if sys.argv[0] == "-c":
    os._exit(1)


class ProcessGroupBabyExiting(ProcessGroupBabyGloo):
    _name: ClassVar[str] = "exiting"
