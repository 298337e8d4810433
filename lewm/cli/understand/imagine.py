"""`lewm understand imagine`: how far imagined futures are from what happens."""

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
class ImagineArgs(SubjectArgs):
    """Compare imagined futures with what happens: under recorded actions, random ones, and those of a search."""

    blocks: int = 5  # Action blocks ahead.
    windows: int = 128  # Pieces of episodes, under recorded actions.
    searches: int = 16  # Starts from which a plan is searched for as well; 0: none.


def run(arguments: list[str]) -> None:
    """Roll out, execute, and compare."""
    args = parse_checked(ImagineArgs, arguments, "understand imagine")
    from lewm.understand.imagine import ImagineSettings, imagined

    settings = ImagineSettings(args.blocks, args.windows, args.searches, args.seed)

    def ask(subject: Subject, store: EpisodeStore | None, on_progress: ProgressCallback) -> Findings:
        assert store is not None
        return imagined(subject, store, settings, args.folder, on_progress)

    answer("imagine", args, ask)
