"""Uncertainty of a success rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Rate:
    """``successes`` out of ``total``, with the Wilson score interval at 95 %."""

    successes: int
    total: int

    @property
    def value(self) -> float:
        return self.successes / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval: unlike the normal approximation it stays in [0, 1] and is honest near 0 and 1."""
        n, p, z2 = self.total, self.value, Z_95**2
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "successes": self.successes,
            "episodes": self.total,
            "rate": self.value,
            "interval_95": list(self.interval),
        }

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.successes}/{self.total})"
