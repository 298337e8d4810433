"""Uncertainty of a success rate, and of the difference between two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Rate:
    """``successes`` out of ``total``, with the Wilson score interval at 95 %."""

    successes: int
    total: int

    @staticmethod
    def of(outcomes: Iterable[bool | None]) -> Rate:
        """The rate of true ones; None does not count."""
        counted = [outcome for outcome in outcomes if outcome is not None]
        return Rate(sum(counted), len(counted))

    @property
    def value(self) -> float:
        return self.successes / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval: unlike the normal approximation it stays in [0, 1] and is honest near 0 and 1."""
        if not self.total:
            return 0.0, 1.0
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


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same episodes. only_first, only_second: episodes that one solved and the other did not."""

    first: Rate
    second: Rate
    only_first: int
    only_second: int

    @staticmethod
    def of(first: Sequence[bool], second: Sequence[bool]) -> Comparison:
        """Compare outcomes of the same episodes in the same order."""
        pairs = list(zip(first, second, strict=True))
        return Comparison(Rate.of(first), Rate.of(second), pairs.count((True, False)), pairs.count((False, True)))

    @property
    def p_value(self) -> float:
        """McNemar's test, exact and two-sided: if neither were better, each discordant episode would be a fair coin."""
        discordant = self.only_first + self.only_second
        tail = sum(math.comb(discordant, k) for k in range(min(self.only_first, self.only_second) + 1))
        return min(1.0, 2 * tail / 2**discordant)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, as Holm does: with luck alone, the least is below 0.05 once in 20 times."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
