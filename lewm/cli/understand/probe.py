"""`lewm understand probe`: which physical quantities a model's embeddings hold."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from lewm.cli.frame import console, say
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import SubjectArgs, episodes_for, parse_checked, show
from lewm.understand.probe_settings import VERB, ProbeSettings


@dataclass(frozen=True, kw_only=True)
class ProbeArgs(SubjectArgs):
    """Read physical quantities from frozen embeddings, with a linear probe and a small MLP."""

    # Models to probe beside it, on the same frames and splits.
    compare: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CHECKPOINT"), tyro.conf.UseAppendAction] = ()
    probe: ProbeSettings = field(default_factory=ProbeSettings)  # How probes are made.


def run(arguments: list[str]) -> None:
    """Probe behind a progress bar, print what was found, and write it."""
    args = parse_checked(ProbeArgs, arguments, f"understand {VERB}")
    from lewm.understand.findings import check_outputs, read_findings
    from lewm.understand.probe import ask, check_question, probed
    from lewm.understand.subject import embeddings, model_folder, open_episodes, open_subject

    sources = (args.checkpoint, *args.compare)
    check_outputs(args.folder, VERB, [*([args.data] if args.data else []), *map(model_folder, sources)])
    subject, *others = (open_subject(source, args.device) for source in sources)
    earlier = read_findings(args.folder, VERB)
    with ExitStack() as stack:
        data = episodes_for(args, subject)
        store = stack.enter_context(open_episodes(data, subject))
        for other in others:
            stack.enter_context(open_episodes(data, other))  # refuses what does not fit the others
        if earlier is None or earlier.question != ask(subject, store, args.probe, others, args.seed):
            check_question(subject, store, args.probe, others, args.seed)
            for model in (subject, *others):
                with progress_bar(console, "embed") as on_progress, embeddings(model, store, on_progress, say):
                    pass  # kept, so that it takes no time below
        with progress_bar(console, "probe") as on_progress:
            found = probed(subject, store, args.probe, args.folder, others, args.seed, on_progress, say)
    show(found, args.folder, earlier)
