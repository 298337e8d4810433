"""`lewm understand surprise`: how a model notices what its world cannot do."""

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
class SurpriseArgs(SubjectArgs):
    """Live through held-out episodes again, each time with one thing changed: does the model notice?"""

    trajectories: int = 40  # Episodes that are lived through, each with every change of its world.
    before: int = 3  # Scored frames before the changed one.
    after: int = 5  # Scored frames after it.


def run(arguments: list[str]) -> None:
    """Measure, print and write."""
    args = parse_checked(SurpriseArgs, arguments, "understand surprise")
    from lewm.understand.surprise import check_subject, surprised
    from lewm.understand.surprise_findings import SurpriseSettings

    settings = SurpriseSettings(args.trajectories, args.before, args.after, args.seed)

    def ask(subject: Subject, store: EpisodeStore | None, on_progress: ProgressCallback) -> Findings:
        assert store is not None
        return surprised(subject, store, settings, args.folder, on_progress)

    answer("surprise", args, ask, check=check_subject)
