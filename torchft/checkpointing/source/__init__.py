"""The source of a heal: offers the state of a step, and serves it to targets.

`checkpoint` is the state in the form in which it is sent, and `offer` serves it from live tensors or copies.
`publisher` decides which step targets get, and for how long. `server` answers their requests over HTTP, at
the rate of `pacer`.
"""
