"""Random streams that depend on what they are for, never on how the work is divided.

One stream per purpose and episode, derived from its key: ``stream(seed, episode)`` gives the same numbers
whichever worker, batch or device asks for them.

A new purpose has a name, which comes first: ``stream("studio.noise", seed, episode)``. Different keys that begin with a
name never give the same numbers. Keys of numbers alone are those that were in use before names: they keep their
streams, and NumPy pads them, so that (7,) is the same key as (7, 0). tests/test_rng.py lists all that there are.
"""

from __future__ import annotations

import hashlib
import json
from operator import index

import numpy as np


def stream(*key: int | str) -> np.random.Generator:
    """A NumPy generator that is a pure function of ``key``: the purpose's name, then non-negative integers."""
    return np.random.default_rng(_sequence(*key))


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed that is a pure function of ``key``; for generators that take a single integer."""
    return int(_sequence(*key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _sequence(*key: int | str) -> np.random.SeedSequence:
    name, numbers = (key[0], key[1:]) if key and isinstance(key[0], str) else (None, key)
    words = [index(number) for number in numbers]  # type: ignore[arg-type]
    if name is None:
        return np.random.SeedSequence(words)
    if any(word < 0 for word in words):  # as NumPy refuses them
        raise ValueError(f"a key needs non-negative integers, got {key}")
    text = json.dumps([name, *words])
    return np.random.SeedSequence(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))
