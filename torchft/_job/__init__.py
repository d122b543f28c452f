"""The parts of ``torchft.job``: what the environment decides, checkpoints, and values of a step."""
