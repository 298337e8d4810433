"""`lewm understand landscape`: how far latent distances tell near from far."""

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
class LandscapeArgs(SubjectArgs):
    """Measure latent distances along episodes: where they no longer grow, a search for a plan is blind."""


def run(arguments: list[str]) -> None:
    """Embed episodes, and compare distances along them with those between them."""
    args = parse_checked(LandscapeArgs, arguments, "understand landscape")
    from lewm.understand.landscape import investigate

    def ask(subject: Subject, store: EpisodeStore | None, on_progress: ProgressCallback) -> Findings:
        assert store is not None
        return investigate(subject, store, args.folder, args.seed, False, on_progress)

    answer("landscape", args, ask)
