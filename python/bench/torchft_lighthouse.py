"""The console script `torchft_lighthouse`, like the one that pip writes; it runs the torchft on
PYTHONPATH.
"""

import sys

from torchft._torchft import lighthouse_main

sys.exit(lighthouse_main())
