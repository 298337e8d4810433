"""`lewm understand probe`: which physical quantities a model's embeddings hold."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from lewm.cli.frame import console, parse, say
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import SubjectArgs, episodes_for, show
from lewm.understand.probe_settings import VERB, ProbeSettings


@dataclass(frozen=True, kw_only=True)
class ProbeArgs(SubjectArgs):
    """Read physical quantities from frozen embeddings, with a linear probe and a small MLP."""

    # Models to probe beside it, on the same frames and splits.
    compare: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CHECKPOINT"), tyro.conf.UseAppendAction] = ()
    probe: ProbeSettings = field(default_factory=ProbeSettings)


def run(arguments: list[str]) -> None:
    """Probe behind a progress bar, print what was found, and write it."""
    args = parse(ProbeArgs, arguments, f"understand {VERB}")
    from lewm.understand.findings import check_outputs, read_findings, write_findings
    from lewm.understand.probe import ask, parts_of, probe
    from lewm.understand.probe_findings import draw
    from lewm.understand.subject import embeddings, model_folder, open_episodes, open_subject

    sources = (args.checkpoint, *args.compare)
    subject, *others = (open_subject(source, args.device) for source in sources)
    data = episodes_for(args, subject)
    check_outputs(args.folder, VERB, [data, *map(model_folder, sources)])
    with ExitStack() as stack:
        store = stack.enter_context(open_episodes(data, subject))
        for other in others:
            stack.enter_context(open_episodes(data, other))  # refuses what does not fit the others
        asked = ask(subject, store, args.probe, others, args.seed)
        found = read_findings(args.folder, VERB, asked)
        if found is not None:
            say("This very question was answered before; nothing is done again.")
        else:
            for model in (subject, *others):
                with progress_bar(console, "embed") as on_progress, embeddings(model, store, on_progress, say):
                    pass  # kept, so that it takes no time below
            with progress_bar(console, "probe") as on_progress:
                parts = parts_of(args.folder)
                found = probe(subject, store, args.probe, others, args.seed, parts, on_progress, say)
            write_findings(args.folder, found, draw)
    show(found, args.folder)
