"""The conversion of numbers to 8-bit codes: see `torchft.quantization`."""
