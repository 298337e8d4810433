"""Settings of probes, apart from what needs torch, so that the command line can show them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lewm.checked import Checked

VERB = "probe"


@dataclass(frozen=True)
class ProbeSettings(Checked):
    """How probes are made; the paper does not say how its own were."""

    SECTION: ClassVar[str] = "probe"

    properties: tuple[str, ...] = ()  # What to read; none: all that the world knows of its states.
    splits: int = 3  # Splits by episode, each with MLPs of its own.
    ridge: float = 1e-3  # Penalty of the linear probe.
    epochs: int = 50  # Most that an MLP is trained.
    most_frames: int = 50_000  # Of more than these, so many are drawn.
    tokens: Literal["mean", "flat"] = "mean"  # What is made of a frame's tokens, where an encoder gives tokens.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("splits", "epochs", most=1000)
        self._check_positive("ridge", "most_frames", most=10**8)
