"""Random streams that depend on what they are for, never on how the work is divided.

One stream per purpose and episode, derived from its key: ``stream(seed, episode)`` gives the same numbers
whichever worker, batch or device asks for them.
"""

from __future__ import annotations

import numpy as np


def stream(*key: int) -> np.random.Generator:
    """A NumPy generator that is a pure function of the non-negative integers in ``key``."""
    return np.random.default_rng(np.random.SeedSequence(key))


def derive_seed(*key: int) -> int:
    """A 63-bit seed that is a pure function of ``key``; for generators that take a single integer."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
