"""A state as bytes, for source and target alike.

`encoding` turns a state into JSON and regions of memory, and back (DTensors by `dtensor`). `layout` lists its
tensors by path, and `digest` compares them. `handshake` has the frames that precede the regions, `requests`
the URLs, and `token` the proof that a request needs. `stream` writes and reads PyTorch's format, and
`upstream` names the parts of a state as upstream's targets expect them.
"""
