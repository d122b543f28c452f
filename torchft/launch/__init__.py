"""Running a whole job on this machine: a lighthouse and replica groups, each with a separate torchrun."""
