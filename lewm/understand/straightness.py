"""`lewm understand straightness`: how straight latent paths are, over training and now.

Paper, Eq. "path-straightening": the mean cosine of successive latent velocities. Over training it comes from what runs
have measured of held-out windows at each validation. Of given episodes it is measured here, of a model as it is and of
a run's series of small models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lewm import checkpoint
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.files import json_digest, read_json
from lewm.train.diagnostics import effective_rank, straightness
from lewm.train.logs import read_metrics
from lewm.train.run import Run
from lewm.types import ProgressCallback
from lewm.understand.figures import COLOURS, FAINT, canvas, styled
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.looking import paths, remarks_on
from lewm.understand.subject import Subject, embeddings, model_folder, open_subject, question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "straightness"
COST = "the embeddings of the episodes"
# What runs have measured, the best first: the same held-out windows each time, or the batch at hand.
_MEASURED = {"val/straightness": "held-out windows", "straightness": "training batches"}
SERIES = "given episodes"


@dataclass(frozen=True)
class Curve:
    """Straightness over the steps of a training. of: what it was measured on."""

    of: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Geometry:
    """The paths of a model through given episodes. turns: pairs of successive velocities.

    spread: of the episodes' means, their standard deviation.  straightness: None where no episode has three frames.
    """

    straightness: float | None
    spread: float | None
    episodes: int
    turns: int
    effective_rank: float
    dimensions: int


@dataclass(frozen=True)
class Entry:
    """One that is compared. run: its folder, None: the model has none here."""

    name: str
    source: str
    method: str
    run: Path | None
    curves: tuple[Curve, ...]
    now: Geometry | None


def fits(subject: Subject) -> str | None:
    """Why it cannot be measured; None: it can."""
    del subject  # whatever encodes has paths
    return None


def compare_straightness(
    named: Sequence[tuple[str, str]],
    store: EpisodeStore | None = None,
    series: bool = False,
    device: str | torch.device = "auto",
    on_progress: ProgressCallback | None = None,
) -> Findings:
    """Of runs or models, each a name and a source. store: episodes to measure them on, with ``series`` theirs too."""
    entries = []
    for name, source in named:
        run = run_of(source)
        curves = tuple(recorded_curves(run)) if run else ()
        now = None
        if store is not None:
            subject = open_subject(source, device)
            now = measure(subject, store, on_progress)
            curves = (*(_series(run, store, device, on_progress) if run and series else ()), *curves)
        entries.append(Entry(name, source, _method(source, run), run, curves, now))
    if not any(entry.curves or entry.now for entry in entries):
        problem = f"{', '.join(entry.source for entry in entries)} kept no measurements of straightness"
        raise ConfigError(f"{problem}. Give episodes to measure the models on, with --data.")
    curves_digest = json_digest([asdict(curve) for entry in entries for curve in entry.curves])
    asked = {"sources": [entry.source for entry in entries], "curves": curves_digest}
    dataset = store.digest if store else None
    return _findings(entries, {"verb": VERB, "model": None, "dataset": dataset, "settings": asked}, ())


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """One model on given episodes, beside what its run has measured; written into ``out``."""
    del seed, quick  # nothing is drawn, and it is quick
    run = run_of(subject.source)
    curves = tuple(recorded_curves(run)) if run else ()
    settings = {"curves": json_digest([asdict(curve) for curve in curves])}
    asked = question(VERB, subject, store, settings)
    found = read_findings(out, VERB, asked)
    if found is None:
        now = measure(subject, store, on_progress)
        entry = Entry(subject.name, subject.source, subject.model.settings.NAME, run, curves, now)
        found = _findings([entry], asked, remarks_on(subject))
        write_findings(out, found, draw)
    return found


# -- measuring -----------------------------------------------------------------------------------------------------


def run_of(source: str | Path) -> Path | None:
    """The run that a source is, or is a checkpoint or a kept model of; None: of none that is here."""
    path = Path(source)
    candidates = (path, path.parent.parent) if path.is_dir() else ()
    return next((folder for folder in candidates if (folder / "metrics.jsonl").is_file()), None)


def recorded_curves(run: Path) -> Iterator[Curve]:
    """What a run has measured itself, the best first."""
    rows = read_metrics(run / "metrics.jsonl")
    for key, what in _MEASURED.items():
        points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float) and np.isfinite(row[key])]
        if points:
            steps, values = zip(*points, strict=True)
            yield Curve(what, steps, values)


def measure(subject: Subject, store: EpisodeStore, on_progress: ProgressCallback | None = None) -> Geometry:
    """A model's paths through episodes, a frame every action block; embeddings are kept beside the dataset."""
    with embeddings(subject, store, on_progress) as features:
        return geometry(paths(subject, store, features))


def geometry(walked: Sequence[torch.Tensor]) -> Geometry:
    """Of paths, float32 (T, D) each: the mean cosine over all turns, and its spread over paths."""
    turning = [z_TD for z_TD in walked if len(z_TD) > 2]
    turns = np.array([len(z_TD) - 2 for z_TD in turning])
    cosines = np.array([straightness(z_TD[None]).item() for z_TD in turning])
    mean = float(np.average(cosines, weights=turns)) if len(turning) else None
    spread = float(cosines.std(ddof=1)) if len(turning) > 1 else None
    points_ND = torch.cat(list(walked))
    rank = effective_rank(points_ND[:, None]).item() if len(points_ND) > 1 else 0.0
    return Geometry(mean, spread, len(walked), int(turns.sum()), rank, points_ND.shape[-1])


def _series(
    run: Path, store: EpisodeStore, device: str | torch.device, on_progress: ProgressCallback | None
) -> Iterator[Curve]:
    """Of the small models that a run has kept, all on the same episodes."""
    kept = checkpoint.of_run(Run(run).series)
    points = []
    for number, folder in enumerate(kept, start=1):
        found = measure(open_subject(folder, device), store)
        if found.straightness is not None:
            points.append((checkpoint.step_of(folder) or 0, found.straightness))
        if on_progress:
            on_progress(number, len(kept))
    if points:
        steps, values = zip(*points, strict=True)
        yield Curve(SERIES, steps, values)


def _method(source: str, run: Path | None) -> str:
    """What is trained there; measurements alone, without settings or a model, do not say."""
    settings = run / checkpoint.CONFIG if run else model_folder(source) / checkpoint.CONFIG
    if not settings.is_file():
        return NONE
    return str((read_json(settings).get("method") or {}).get("name", "lewm"))


# -- what people see -----------------------------------------------------------------------------------------------


def _findings(entries: Sequence[Entry], asked: dict[str, Any], remarks: tuple[str, ...]) -> Findings:
    sentences = [
        "1 is a straight path, 0 a right angle at every frame, -1 a way to and fro. Frames are an action block apart.",
        *remarks,
    ]
    for entry in entries:
        if not entry.curves:
            few = "its windows have too few frames, or it was trained before runs measured it"
            why = few if entry.run else "no run is here"
            sentences.append(f"{entry.name}: nothing over training; {why}.")
        if entry.now and entry.now.straightness is None:
            sentences.append(f"{entry.name}: no episode has three frames, so straightness is undefined.")
    tables = [_over_training(entries)] if any(entry.curves for entry in entries) else []
    tables += [_now(entries)] if any(entry.now for entry in entries) else []
    numbers = {"entries": [_as_json(entry) for entry in entries]}
    return Findings(VERB, "How straight latent paths are", asked, tuple(tables), tuple(sentences), numbers, {})


def _as_json(entry: Entry) -> dict[str, Any]:
    curves = [{"of": c.of, "steps": list(c.steps), "values": list(c.values)} for c in entry.curves]
    now = asdict(entry.now) if entry.now else None
    return {"name": entry.name, "source": entry.source, "method": entry.method, "curves": curves, "now": now}


def _over_training(entries: Sequence[Entry]) -> Table:
    header = ("", "method", "measured on", "measurements", "first", "lowest", "highest", "last")
    rows = []
    for entry in entries:
        for curve in entry.curves[:1]:
            values = (curve.values[0], min(curve.values), max(curve.values), curve.values[-1])
            measured = curve.of, str(len(curve.values))
            rows.append((entry.name, entry.method, *measured, *(f"{value:.3f}" for value in values)))
    return Table("Straightness over training", header, tuple(rows))


def _now(entries: Sequence[Entry]) -> Table:
    header = ("", "method", "episodes", "turns", "straightness", "± over episodes", "effective rank")
    rows = []
    for entry in entries:
        if entry.now:
            now = entry.now
            numbers = (NONE if value is None else f"{value:.3f}" for value in (now.straightness, now.spread))
            rank = f"{now.effective_rank:.1f} of {now.dimensions}"
            rows.append((entry.name, entry.method, str(now.episodes), str(now.turns), *numbers, rank))
    return Table("Straightness on episodes, as the model is now", header, tuple(rows))


@styled
def draw(findings: Findings) -> Figure:
    """Curves over training, one a run; where there is none, a dot for what was measured on episodes."""
    figure, ((axes,),) = canvas(1, 1, 5.2, 3.2)
    entries = findings.numbers["entries"]
    last = max((curve["steps"][-1] for entry in entries for curve in entry["curves"]), default=1)
    for number, entry in enumerate(entries):
        colour, label = COLOURS[number % len(COLOURS)], entry["name"]
        for curve in entry["curves"][:1]:
            steps, values = curve["steps"], np.array(curve["values"])
            width = max(1, len(steps) // 20)
            if width > 1:  # measurements of single batches are noisy
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
                steps = steps[width // 2 :][: len(steps) - width + 1]
                values = np.convolve(values, np.full(width, 1 / width), "valid")
            axes.plot(steps, values, color=colour, marker="o" if width == 1 else None, markersize=3, label=label)
            label = None
        now = entry["now"] and entry["now"]["straightness"]
        if now is not None:
            diamond: Any = {"marker": "D", "markerfacecolor": "white", "markersize": 6, "clip_on": False}
            axes.plot([last], [now], linestyle="none", color=colour, label=label, **diamond)
    axes.set(xlabel="training step", ylabel="mean cosine of successive velocities")
    if not any(entry["curves"] for entry in entries):
        axes.set(xticks=[], xlabel="as the model is now", xlim=(0, 2))
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    if any(entry["now"] for entry in entries):
        axes.plot([], [], "D", color="#222222", markerfacecolor="white", label="on episodes, now")
    axes.legend()
    return figure
