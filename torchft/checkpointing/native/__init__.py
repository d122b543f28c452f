"""What talks to the Go core (go/heal), which moves the regions of a state.

`core` has its server, offers and fetches; `staged_receive` copies what it receives to devices.
"""
