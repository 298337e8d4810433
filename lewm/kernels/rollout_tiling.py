"""How the Triton kernels of the planning rollout divide their work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work.

    rows: tokens per program.  groups: programs that share the heads or hidden chunks of a tile.  warps, stages: per
    program, as in Triton.  chunk: hidden units that an MLP program handles at a time.
    """

    rows: int
    groups: int
    warps: int = 4
    stages: int = 2
    chunk: int = 64


Kernel = Literal["attention", "attention_past", "mlp", "output"]
# The largest number of rows that each tiling is for; the fastest of a sweep on an H200.
_TILINGS: dict[Kernel, list[tuple[float, Tiling]]] = {
    "attention": [(600, Tiling(32, 16)), (1500, Tiling(32, 4)), (4000, Tiling(32, 2)), (math.inf, Tiling(32, 1))],
    "attention_past": [(1500, Tiling(32, 16)), (math.inf, Tiling(32, 1))],
    "mlp": [
        (600, Tiling(32, 16, chunk=128)),
        (1500, Tiling(64, 8)),
        (6000, Tiling(64, 2)),
        (math.inf, Tiling(128, 1, warps=8, stages=3)),
    ],
    "output": [(math.inf, Tiling(64, 1, stages=3))],
}


def choose_tiling(kernel: Kernel, rows: int) -> Tiling:
    """The tiling for a number of rows; ``attention_past`` is attention that sees earlier tokens."""
    return next(tiling for most, tiling in _TILINGS[kernel] if rows <= most)
