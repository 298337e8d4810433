"""What the numbers of a world's state are, so that probes can ask for them: a position, an angle, an opening."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lewm.errors import EnvError, unknown_name

QuantityKind = Literal["plain", "length", "angle", "yaw", "quaternion", "opening"]


@dataclass(frozen=True)
class Quantity:
    """Something physical that a state holds.

    numbers: which of the ``state_names`` it is made of.
    kind: "plain" numbers; "length", coordinates of a place; "angle", each number one, in radians; "yaw", the turn about
        z of a "quaternion", whose four numbers (w, x, y, z) it has as well; "opening", from 0 to 1.
    period, seam: of an angle or a yaw: after how much it is the same again, and where its values begin anew.
    unit: of plain numbers and lengths.
    """

    name: str
    numbers: tuple[str, ...]
    kind: QuantityKind = "plain"
    period: float = 2 * math.pi
    seam: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        wanted = {"yaw": 4, "quaternion": 4, "opening": 1}.get(self.kind, len(self.numbers) or 1)
        if len(self.numbers) != wanted:
            raise EnvError(f"{self.name!r} is of the kind {self.kind!r}: give it {wanted} numbers, not {self.numbers}.")
        if not self.period > 0:
            raise EnvError(f"The period of {self.name!r} must be positive, got {self.period}.")

    def places(self, state_names: Sequence[str]) -> list[int]:
        """Where its numbers are in the state."""
        for number in self.numbers:
            if number not in state_names:
                raise EnvError(
                    unknown_name(f"number of the state, of which {self.name!r} is made,", number, state_names)
                )
        return [state_names.index(number) for number in self.numbers]


def plain_quantities(state_names: Sequence[str]) -> tuple[Quantity, ...]:
    """Each number by itself: for states of which nothing more is known."""
    return tuple(Quantity(name, (name,)) for name in state_names)
