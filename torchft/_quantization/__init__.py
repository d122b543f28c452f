"""How numbers become 8-bit codes: see `torchft.quantization`."""
