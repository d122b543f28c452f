"""The console script `torchft_lighthouse`, as pip makes it, for the torchft on PYTHONPATH."""

import sys

from torchft._torchft import lighthouse_main

sys.exit(lighthouse_main())
