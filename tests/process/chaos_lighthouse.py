"""The command `torchft_lighthouse` of the torchft on PYTHONPATH."""

from torchft._torchft import lighthouse_main

if __name__ == "__main__":
    lighthouse_main()
