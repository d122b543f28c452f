"""Running a whole job on this machine: a lighthouse and replica groups, each a torchrun of its own."""
