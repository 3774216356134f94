"""The engine behind Paddle's CPU generator, MT19937-64: how many numbers it has drawn since a seed.

2.6.2 can seed its generator, but cannot be given a state; drawing as many numbers leads there.
Source: Nishimura, "Tables of 64-bit Mersenne Twisters", 2000.
"""

from __future__ import annotations

import numpy as np

from fleetpipe.errors import CheckpointError

_WORDS, _MIDDLE = 312, 156
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_ONE = np.uint64(1)
#: Numbers after which it is not looked for any longer: a minute's work.
MOST = 1_000_000_000


def draws(seeded: str, text: str) -> int:
    """Returns how many numbers lie between the state of a new seed and another one.

    Args:
        seeded: The state after seeding, as the C++ library prints it: 312 words, and the place in
            them.
        text: The other state.

    Raises:
        CheckpointError: It does not come from this seed, or is further away than MOST.
    """
    (state, _), (wanted, place) = _parsed(seeded), _parsed(text)
    for block in range(MOST // _WORDS):
        if state[0] == wanted[0] and np.array_equal(state, wanted):
            return block * _WORDS + place - _WORDS
        state = _next_block(state)
    raise CheckpointError(
        "the state of the random generator cannot be reached on this Paddle",
        got=f"a state that is not within {MOST} numbers of its seed",
        cause="2.6.2 can only seed its generator and draw",
        fix="restore on paddlepaddle 3.3, or leave the random states out with only=",
    )


def _parsed(text: str) -> tuple[np.ndarray, int]:
    *words, place = map(int, text.split())
    return np.array(words, np.uint64), place


def _next_block(state: np.ndarray) -> np.ndarray:
    """Returns the next words: the second half needs the first, and the last word all of it."""
    following = np.empty_like(state)
    twisted = _twisted(state[:-1], state[1:])
    following[:_MIDDLE] = state[_MIDDLE:] ^ twisted[:_MIDDLE]
    following[_MIDDLE:-1] = following[: _MIDDLE - 1] ^ twisted[_MIDDLE:]
    following[-1:] = following[_MIDDLE - 1 : _MIDDLE] ^ _twisted(state[-1:], following[:1])
    return following


def _twisted(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed = (one & _UPPER) | (other & _LOWER)
    twisted: np.ndarray = (mixed >> _ONE) ^ ((mixed & _ONE) * _MATRIX)
    return twisted
