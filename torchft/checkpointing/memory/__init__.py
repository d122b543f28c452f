"""Memory for the bytes of a state.

`host` allocates host memory. `reservation` knows how much this process may still allocate, and reserves some
of it among the processes of the host. `staging` copies between host memory and devices.
"""
