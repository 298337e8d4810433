"""`lewm understand CHECKPOINT`: everything that fits a model's world, on one page that needs nothing else.

    OUT/report.html      the page: tables, sentences, figures and films, all inside it
    OUT/VERB.*           what each verb found, as it writes it alone

A part is a verb's module with ``fits(subject)``, a reason why it does not or None, and ``investigate(subject, store,
out, seed, quick, on_progress)``, which computes its findings or reads those of an earlier call, and writes them.
"""

from __future__ import annotations

import base64
import importlib
import importlib.resources
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, LewmError, unknown_name
from lewm.evaluate.comparison_tables import Table
from lewm.files import PAGE, check_output, completing
from lewm.types import ProgressCallback
from lewm.understand.findings import Findings, figure_of
from lewm.understand.subject import Subject
from lewm.version import __version__

REPORT = "report.html"
_PICTURES = {".png": "image/png", ".gif": "image/gif"}
# A part's bar, by the part's verb.
Bars = Callable[[str], "ProgressCallback | None"]


@dataclass(frozen=True)
class Part:
    """A verb of the report. module: of lewm.understand.  costs: what takes the time."""

    verb: str
    module: str
    costs: str


# In the order of the page.
PARTS = (
    Part("probe", "probe", "embedding the episodes, which other parts then need not, and training small networks"),
    Part("decode", "decode", "little, where a decoder is; without one it is left out"),
    Part("map", "latent_map", "drawing and embedding some hundred states"),
    Part("imagine", "imagine", "embedding some hundred frames, and searching for plans"),
    Part("straightness", "straightness", "nothing once the episodes are embedded"),
    Part("landscape", "landscape", "nothing once the episodes are embedded"),
    Part("notice", "notice", "drawing and embedding some hundred states for each thing that changes"),
    Part("surprise", "surprise", "simulating and embedding matched episodes"),
)


@dataclass(frozen=True)
class Section:
    """What became of a part. found: or None, for a ``reason``.  seconds: it took."""

    part: Part
    found: Findings | None
    reason: str | None
    seconds: float


def check_parts(names: Sequence[str]) -> None:
    """Refuse names of parts that there are none of."""
    known = [part.verb for part in PARTS]
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name("part of the report", name, known))


def investigate_all(
    subject: Subject,
    store: EpisodeStore,
    out: Path,
    seed: int = 0,
    quick: bool = False,
    skip: Sequence[str] = (),
    bars: Bars = lambda _: None,
) -> Iterator[Section]:
    """Every part that fits, one after another. What one cannot do is its section's reason, and stops no other."""
    check_parts(skip)
    for part in PARTS:
        if part.verb in skip:
            continue
        module, started = importlib.import_module(f"lewm.understand.{part.module}"), time.monotonic()
        found, reason = None, module.fits(subject)
        if reason is None:
            try:
                found = module.investigate(subject, store, out, seed, quick, bars(part.verb))
            except LewmError as error:
                reason = str(error)
        yield Section(part, found, reason, time.monotonic() - started)


def write_report(out: Path, subject: Subject, store: EpisodeStore, sections: Sequence[Section]) -> Path:
    """Write the page into ``out``, atomically; returns it."""
    path = out / REPORT
    check_output(path, PAGE)
    template = (importlib.resources.files("lewm.understand") / "report_template.html").read_text(encoding="utf-8")
    shown = [section for section in sections if section.found]
    left_out = [(section.part.verb, section.reason) for section in sections if section.reason]
    world = subject.world
    page = Template(template).substitute(
        name=escape(subject.name),
        world=escape(world.gym_id if world else "a world of its own"),
        description=escape(world.description if world else "This model does not say in which world it was trained."),
        links="".join(_link(section) for section in shown),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _facts(subject, store)),
        sections="".join(_section(section, out) for section in shown),
        left_out=_left_out(left_out),
        version=escape(__version__),
    )
    with completing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _facts(subject: Subject, store: EpisodeStore) -> Iterator[tuple[str, str]]:
    model = subject.model
    yield "Model", f"{subject.source}, {sum(p.numel() for p in model.parameters()):,} parameters"
    yield "Digest", subject.digest[:16]
    yield "Embedding of a frame", " x ".join(map(str, subject.encoder.shape))
    yield (
        "Episodes",
        f"{store.num_episodes} with {store.num_frames:,} frames of {store.resolution} pixels: {store.path}",
    )
    yield "Device", str(subject.device)


def _link(section: Section) -> str:
    assert section.found is not None
    return f'<a href="#{section.part.verb}">{escape(section.found.title)}</a>'


def _section(section: Section, out: Path) -> str:
    found = section.found
    assert found is not None
    pictures = [(figure_of(out, found.verb), "")]  # the section's title says what it is
    pictures += [(out / name, caption) for name, caption in found.files.items() if not _is_other(name)]
    shown = "".join(_picture(path, caption, found.title) for path, caption in pictures if path.is_file())
    others = [f"<code>{escape(name)}</code>: {escape(text)}" for name, text in found.files.items() if _is_other(name)]
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in found.sentences)
    beside = f'<p class="note">Beside this page: {"; ".join(others)}.</p>' if others else ""
    tables = "".join(map(_table, found.tables))
    content = f"<h2>{escape(found.title)}</h2>{shown}{tables}<ul>{sentences}</ul>{beside}"
    return f'<section id="{found.verb}">{content}</section>'


def _is_other(name: str) -> bool:
    return Path(name).suffix not in _PICTURES


def _picture(path: Path, caption: str, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    source = f"data:{_PICTURES[path.suffix]};base64,{data}"
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{escape(caption or title)}">{below}</figure>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h3>{escape(table.title)}</h3><div class="scroll">{body}</div>'


def _left_out(reasons: Sequence[tuple[str, str | None]]) -> str:
    if not reasons:
        return ""
    items = "".join(f"<li><b>{escape(verb)}</b>: {escape(reason or '')}</li>" for verb, reason in reasons)
    return f'<section id="left-out"><h2>What is not here</h2><ul>{items}</ul></section>'
