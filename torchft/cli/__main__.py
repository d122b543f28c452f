from torchft.cli import entry

entry()
