"""The order of an epoch: a permutation of ``range(length)``, of which any part can be computed by itself.
Pure.

Every machine and every version of Python computes the same one, because it uses only integers and SHAKE-256.
No memory of the size of the dataset is needed: a rank computes the indices of its own units only.

The algorithm is Black and Rogaway's generalized Feistel cipher ("Ciphers with Arbitrary Finite Domains",
CT-RSA 2002). A number below a * b is a pair (left, right). Each round adds a function of one half to the
other, modulo a or b, which can be undone for any function. So all rounds together are a permutation of
range(a * b). A result of ``length`` or more is encrypted again until it is below ``length`` (cycle walking,
from the same paper), which gives a permutation of range(length). This is rare, because a and b are close to
the square root of the length.

The function of a round is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014). Its keys are a hash of length, seed and epoch together, so epoch 1 of seed 0
differs from epoch 0 of seed 1. It is for shuffling, and not secure as a cipher.
"""

from __future__ import annotations

import hashlib
import math
import struct

# With 8 rounds some orders of 5 samples are far more frequent than others; with 12 no test finds that.
_ROUNDS = 12
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of ``range(length)``.

    Args:
        length: number of elements, at least 1.
        seed: any whole number.
        epoch: any whole number.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        text = f"torchft.data permutation 1: length {length}, seed {seed}, epoch {epoch}"
        keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.shake_256(text.encode()).digest(8 * _ROUNDS))
        self._keys = tuple(zip(keys[::2], keys[1::2]))
        self._length = length
        self._a = math.isqrt(length - 1) + 1
        self._b = -(-length // self._a)

    def __getitem__(self, place: int) -> int:
        """Returns the index at a place of the order; both are in [0, length)."""
        if not 0 <= place < self._length:
            raise IndexError(f"place is {place}: allowed are 0 to {self._length - 1}")
        index = self._encrypt(place)
        while index >= self._length:
            index = self._encrypt(index)
        return index

    def _encrypt(self, number: int) -> int:
        left, right = divmod(number, self._b)
        for key, next_key in self._keys:
            left = (left + _mix(right ^ key)) % self._a
            right = (right + _mix(left ^ next_key)) % self._b
        return left * self._b + right


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
