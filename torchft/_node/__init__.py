"""The check of a node before it joins a job: ``torchft doctor --node`` and ``torchft run --check``.

``check`` is the command, in a process of its own; ``figures`` measures, ``faults`` reads what the kernel and
NVML have recorded, ``together`` meets the other nodes and measures the connections; ``verdict``, pure, says
which node is bad.
"""
