"""The console script `torchft_lighthouse` as pip would write it; it runs the torchft that PYTHONPATH selects."""

import sys

from torchft._torchft import lighthouse_main

sys.exit(lighthouse_main())
