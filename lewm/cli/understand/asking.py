"""How most verbs of `lewm understand` go: open the model and its episodes, ask behind a bar, and show the answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from lewm.cli.frame import console
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import SubjectArgs, episodes_for, show

if TYPE_CHECKING:
    from lewm.data.store import EpisodeStore
    from lewm.types import ProgressCallback
    from lewm.understand.findings import Findings
    from lewm.understand.subject import Subject

    # A model, episodes if the verb looks at any, a bar -> findings that are written.
    Ask = Callable[[Subject, "EpisodeStore | None", ProgressCallback], Findings]


def answer(
    verb: str, args: SubjectArgs, ask: Ask, episodes: bool = True, check: Callable[[Subject], object] | None = None
) -> None:
    """Ask, and print what was found.

    episodes: whether the verb looks at recorded ones.  check: refuses a model before any are collected.
    """
    from lewm.understand.findings import check_outputs, read_findings
    from lewm.understand.subject import model_folder, open_episodes, open_subject

    check_outputs(args.folder, verb, [model_folder(args.checkpoint), *([args.data] if args.data else [])])
    subject = open_subject(args.checkpoint, args.device)
    if check:
        check(subject)
    earlier = read_findings(args.folder, verb)
    opened = open_episodes(episodes_for(args, subject), subject) if episodes else nullcontext()
    with opened as store, progress_bar(console, verb) as on_progress:
        found = ask(subject, store, on_progress)
    show(found, args.folder, earlier)
