"""Memory for the bytes of a state.

`host` allocates host memory, and knows how much this process may still allocate, of which `reservation`
reserves some among the processes of the host. `staging` copies between host memory and devices.
"""
