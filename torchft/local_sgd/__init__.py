"""Training with rare synchronization: LocalSGD, and DiLoCo with streamed fragments.

| file | what it holds |
|---|---|
| ``local_sgd`` | parameters are averaged every so many steps |
| ``diloco`` | the schedule: which fragment of a model is synchronized when; the checks of the arguments |
| ``fragment`` | one fragment: its last global parameters, the values it sends, the outer step |
| ``buckets`` | the buffers of the collectives |
| ``inner_steps`` | hooks that run after each step of the inner optimizer |
| ``parameters`` | which parameters take part, and their local parts (DTensor) |

docs/local_sgd.md says how to choose the settings and what happens when a group fails.
"""

from torchft.local_sgd.buckets import USE_BUCKETIZATION_ENV
from torchft.local_sgd.diloco import DiLoCo
from torchft.local_sgd.local_sgd import LocalSGD
from torchft.local_sgd.parameters import extract_local_tensor

__all__ = ["USE_BUCKETIZATION_ENV", "DiLoCo", "LocalSGD", "extract_local_tensor"]
