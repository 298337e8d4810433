"""`lewm understand surprise`: how a model notices what its world cannot do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lewm.cli.frame import console, parse, say
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import SubjectArgs, show

if TYPE_CHECKING:
    from lewm.understand.subject import Subject


@dataclass(frozen=True, kw_only=True)
class SurpriseArgs(SubjectArgs):
    """Live through held-out episodes again, each time with one thing changed: does the model notice?"""

    trajectories: int = 40  # Episodes that are lived through, each with every change of its world.
    before: int = 3  # Scored frames before the changed one.
    after: int = 5  # Scored frames after it.
    episodes: int = 80  # To collect, without --data, as OUT/episodes.h5; those that are too short are passed over.
    demos: Path | None = None  # Demonstrations for these episodes to replay (Push-T).


def run(arguments: list[str]) -> None:
    """Measure, print and write."""
    args = parse(SurpriseArgs, arguments, "understand surprise")
    from lewm.understand.episodes import another_kind
    from lewm.understand.findings import check_outputs, read_findings, write_findings
    from lewm.understand.subject import model_folder, open_episodes, open_subject
    from lewm.understand.surprise import ROWS, VERB, SurpriseSettings, asked_of, check_subject, surprise

    settings = SurpriseSettings(args.trajectories, args.before, args.after, args.seed)
    folder = args.folder
    check_outputs(folder, VERB, [model_folder(args.checkpoint), *([args.data] if args.data else [])])
    subject = open_subject(args.checkpoint, args.device)
    check_subject(subject)
    with open_episodes(args.data or _collected(args, subject), subject) as store:
        known = read_findings(folder, VERB, asked_of(subject, store, settings))
        if known is not None and (folder / ROWS).is_file():
            say("The same was asked before; nothing is computed again.")
            show(known, folder)
            return
        with progress_bar(console, "trajectories") as on_progress:
            findings = surprise(subject, store, settings, folder, on_progress)
        remark = another_kind(subject, store)
        findings = replace(findings, sentences=(*findings.sentences, *([remark] if remark else [])))
    from lewm.understand.surprise_figure import draw  # matplotlib takes its time

    write_findings(folder, findings, draw)
    show(findings, folder)


def _collected(args: SurpriseArgs, subject: Subject) -> Path:
    """Held-out episodes of the model's world."""
    from lewm.understand.episodes import held_out_episodes

    with progress_bar(console, "collect") as on_progress:
        path = args.folder / "episodes.h5"
        return held_out_episodes(subject, path, args.episodes, args.seed, args.demos, on_progress)
