"""The target of a heal: fetches a state from one or more sources.

`receive` asks a source by `request`, chooses the format, and asks again as `retry` decides, until the
`deadline`. A `transfer` fills memory through the Go core, with blocks of additional `sources`; `upstream`
reads upstream's format. `target` is the state that this group has: its tensors are the `places` of the
received ones. `progress` reports how much has arrived.
"""
