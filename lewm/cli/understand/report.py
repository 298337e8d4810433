"""`lewm understand CHECKPOINT`: everything that fits the world, on one page."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from lewm.cli.frame import console, say
from lewm.cli.progress import Display, training_bar
from lewm.cli.understand.common import SubjectArgs, episodes_for, parse_checked

if TYPE_CHECKING:
    from lewm.types import ProgressCallback
    from lewm.understand.report import Section


@dataclass(frozen=True, kw_only=True)
class ReportArgs(SubjectArgs):
    """Ask everything that fits a model's world, and write one page that needs nothing else.

    What was asked before is not asked again. Decoded films are on the page once a decoder is there:
    `lewm understand decode CHECKPOINT --train`.
    """

    quick: bool = False  # Fewer frames and seeds: numbers are rougher.
    skip: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # Parts to leave out, by verb; may be repeated.


class _Bars:
    """A bar for each part, one after another."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.display: Display | None = None

    def __call__(self, verb: str) -> ProgressCallback:
        self._stack.close()
        self.display = self._stack.enter_context(training_bar(console, verb))
        return self.display.update


def run(arguments: list[str]) -> None:
    """Ask part after part, and write the page."""
    args = parse_checked(ReportArgs, arguments, "understand")
    from lewm.files import PAGE, check_output
    from lewm.understand.findings import check_outputs
    from lewm.understand.report import PARTS, REPORT, check_parts, investigate_all, write_report
    from lewm.understand.subject import model_folder, open_episodes, open_subject

    check_parts(args.skip)
    inputs = [model_folder(args.checkpoint), *([args.data] if args.data else [])]
    check_output(args.folder / REPORT, PAGE, inputs)
    for part in PARTS:
        if part.verb not in args.skip:
            check_outputs(args.folder, part.verb, inputs)
    started = time.monotonic()
    sections: list[Section] = []
    subject = open_subject(args.checkpoint, args.device)
    with open_episodes(episodes_for(args, subject), subject) as store:
        with ExitStack() as stack:
            asked = investigate_all(subject, store, args.folder, args.seed, args.quick, args.skip, _Bars(stack))
            for section in asked:
                stack.close()
                sections.append(section)
                say(_line(section))
        path = write_report(args.folder, subject, store, sections)
    say(f"Report: {path} ({time.monotonic() - started:.0f} s)")


def _line(section: Section) -> str:
    if section.found is None:
        return f"{section.part.verb}: left out; {section.reason}"
    return f"{section.part.verb}: {section.found.title} ({section.seconds:.0f} s)"
