"""`lewm understand notice`: what of its world a model sees."""

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
class NoticeArgs(SubjectArgs):
    """Measure how far the embedding moves when one thing of the world changes, and nothing else."""

    quick: bool = False  # A quarter of the frames.


def run(arguments: list[str]) -> None:
    """Draw recorded states again, each with one thing changed."""
    args = parse_checked(NoticeArgs, arguments, "understand notice")
    from lewm.understand.notice import investigate

    def ask(subject: Subject, store: EpisodeStore | None, on_progress: ProgressCallback) -> Findings:
        assert store is not None
        return investigate(subject, store, args.folder, args.seed, args.quick, on_progress)

    answer("notice", args, ask)
