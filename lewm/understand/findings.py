"""What a verb has found, and its files: OUT/VERB.md, OUT/VERB.json and OUT/VERB.png, each of which appears whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lewm.errors import FileError
from lewm.evaluate.comparison_tables import Table, as_markdown
from lewm.files import Kind, check_output, completing, read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "<!-- lewm understand"
FINDINGS = Kind("findings", (".json",), lambda head: b'"question"' in head and b'"verb"' in head)
NOTES = Kind("a page of findings", (".md",), lambda head: head.startswith(MARK.encode()))

# The figure of findings, drawn from their numbers alone.
Draw = Callable[["Findings"], "Figure"]
DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Findings:
    """What one verb found about one model.

    verb: its name.  title: of the section in a report.  question: what was asked, as ``subject.question`` makes it.
    tables, sentences: what people read.  numbers: all of it as plain JSON, enough to draw the figure again.
    files: what else was written beside, by file name (films, decoders, rows as CSV), each with a caption.
    """

    verb: str
    title: str
    question: dict[str, Any]
    tables: tuple[Table, ...]
    sentences: tuple[str, ...]
    numbers: dict[str, Any]
    files: dict[str, str]

    def markdown(self) -> str:
        """The findings as a page."""
        parts = [f"{MARK} {self.verb}: this page is written anew by the next call -->", f"## {self.title}"]
        parts += [f"- {sentence}" for sentence in self.sentences]
        for table in self.tables:
            parts += [f"### {table.title}", as_markdown(table)]
        return "\n\n".join(parts) + "\n"


def figure_of(out: Path, verb: str) -> Path:
    """Where a verb's figure is."""
    return out / f"{verb}.png"


def check_outputs(out: Path, verb: str, inputs: list[Path]) -> None:
    """Refuse, before the work, a place where findings would take something else's."""
    check_output(out / f"{verb}.json", FINDINGS, inputs)
    check_output(out / f"{verb}.md", NOTES, inputs)


def write_findings(out: Path, findings: Findings, draw: Draw | None = None) -> None:
    """Write page, figure and, last, the JSON: where that is, all of it is there."""
    if draw is not None:
        with completing(figure_of(out, findings.verb)) as temporary:
            draw(findings).savefig(temporary, format="png", dpi=DOTS_PER_INCH)
    with completing(out / f"{findings.verb}.md") as temporary:
        temporary.write_text(findings.markdown(), encoding="utf-8")
    write_json(out / f"{findings.verb}.json", asdict(findings))


def read_findings(out: Path, verb: str, question: dict[str, Any] | None = None) -> Findings | None:
    """What an earlier call found, None if nothing or if the question was another; question None: whatever was asked."""
    path = out / f"{verb}.json"
    if not path.is_file():
        return None
    document = read_json(path)
    try:
        tables = tuple(
            Table(t["title"], tuple(t["header"]), tuple(map(tuple, t["rows"]))) for t in document.pop("tables")
        )
        found = Findings(tables=tables, sentences=tuple(document.pop("sentences")), **document)
    except (AttributeError, KeyError, TypeError) as error:
        raise FileError(f"{path} holds no findings ({error}). Remove it and ask again.") from error
    return found if question is None or found.question == question else None
