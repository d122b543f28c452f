"""What pip makes of the console script `torchft_lighthouse`, for whichever torchft is on PYTHONPATH."""

import sys

from torchft._torchft import lighthouse_main

sys.exit(lighthouse_main())
