"""`lewm compare`: who reaches more goals, or is just luckier?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lewm.cli.frame import parse, print_table, say
from lewm.files import Kind, check_output, completing, write_json


@dataclass(frozen=True)
class CompareArgs:
    """Compare evaluations: success by world, tests episode by episode against the first, and what planning costs."""

    # Results that `lewm eval` wrote, or folders that hold them; NAME=FILE says what one is called.
    files: tyro.conf.Positional[tuple[str, ...]] = ()
    # Tell success apart by kinds of pairs: room (tworoom), block (pusht), velocity or torques (reacher), grasp (cube).
    by: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND"), tyro.conf.UseAppendAction] = ()
    markdown: Path | None = None  # Write the tables to this page.
    json: Path | None = None  # Write everything to this file, outcomes of each pair included.
    figure: Path | None = None  # Draw bars with intervals: .png, .svg or .pdf.


def run(arguments: list[str]) -> None:
    """Compare, print tables, and write what was asked for."""
    args = parse(CompareArgs, arguments, "compare")
    from lewm.evaluate.comparison import compare, to_dict
    from lewm.evaluate.comparison_files import read_entries
    from lewm.evaluate.comparison_tables import markdown, sentences, tables

    entries = read_entries(args.files)
    outputs = list(_outputs(args))
    for path, kind in outputs:
        check_output(path, kind, [entry.path for entry in entries])
    compared = compare(entries, args.by)
    for table in tables(compared):
        print_table(table)
    for sentence in sentences(compared):
        say(sentence)
    if args.markdown:
        with completing(args.markdown) as temporary:
            temporary.write_text(markdown(compared), encoding="utf-8")
    if args.json:
        write_json(args.json, to_dict(compared))
    if args.figure:
        from lewm.evaluate.comparison_figure import write_figure  # matplotlib takes its time

        write_figure(args.figure, compared)
    for path, kind in outputs:
        say(f"{kind.name.capitalize()}: {path}")


def _outputs(args: CompareArgs) -> Iterator[tuple[Path, Kind]]:
    """What is to be written, and what it is."""
    from lewm.evaluate.comparison_files import COMPARISON, FIGURE, MARKDOWN

    places = ((args.markdown, MARKDOWN), (args.json, COMPARISON), (args.figure, FIGURE))
    yield from ((path, kind) for path, kind in places if path)
