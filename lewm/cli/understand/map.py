"""`lewm understand map`: how the latent space lays out a grid of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lewm.cli.understand.asking import answer
from lewm.cli.understand.common import SubjectArgs, parse_checked

if TYPE_CHECKING:
    from lewm.data.store import EpisodeStore
    from lewm.types import ProgressCallback
    from lewm.understand.findings import Findings
    from lewm.understand.subject import Subject


@dataclass(frozen=True, kw_only=True)
class MapArgs(SubjectArgs):
    """Show how the latent space lays out a grid of states, which the world's simulator draws."""

    grid: int = 15  # States each way.
    x: str | None = None  # A number of the state to vary, by name; None: what the world is usually mapped by.
    y: str | None = None  # Another one.
    x_range: tuple[float, float] | None = None  # From where to where; None: all that the state's space allows.
    y_range: tuple[float, float] | None = None  # Likewise.


def run(arguments: list[str]) -> None:
    """Draw the grid, embed it, and lay it out."""
    args = parse_checked(MapArgs, arguments, "understand map")
    from lewm.understand.latent_map import MapSettings, mapped

    settings = MapSettings(args.grid, args.x, args.y, args.x_range, args.y_range, args.seed)

    def ask(subject: Subject, store: EpisodeStore | None, on_progress: ProgressCallback) -> Findings:
        del store
        return mapped(subject, settings, args.folder, on_progress)

    answer("map", args, ask, episodes=False)
