"""What talks to the Go core (go/heal), which moves the regions of a state.

`core` has its server, offers and fetches; `landing` copies what it receives to devices.
"""
