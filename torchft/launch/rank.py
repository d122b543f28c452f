"""Runs a script, with its arguments, in place of this one, in a process that ends with its agent of torchrun.

Otherwise the ranks of an agent that was killed would train on, beside the group that is started in its place.
"""

import ctypes
import os
import signal
import sys

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG is 1
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])  # as torchrun starts a script
