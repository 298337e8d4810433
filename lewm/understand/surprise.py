"""Surprise: does a model notice what its world cannot do?

Held-out episodes are lived through again with the recorded actions, undisturbed and with one thing changed (see
``trajectories.py``). At every frame t the model is asked what it expected:

    error       ‖z_t − ẑ_t‖²,     ẑ_t predicted from the real frames before t and the executed actions
    difference  ‖z_t − z_{t-1}‖², which takes no model of the world: how much the picture has changed

A large jump shows in both. A small one hides among the changes that actions make, unless one knows what they make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError, LewmError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.evaluate.stats import holm
from lewm.files import json_digest, leaving_no_empty_folders, only_writer
from lewm.rng import stream
from lewm.types import Array, ProgressCallback
from lewm.understand.episodes import another_kind
from lewm.understand.extra import extra
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.foresight import Foresight, squared_distance
from lewm.understand.subject import Subject, question
from lewm.understand.surprise_rows import Row, RowJournal, write_rows
from lewm.understand.trajectories import (
    UNDISTURBED,
    Change,
    Excerpt,
    Matched,
    changes_of,
    episodes_long_enough,
    matched,
    recorded_states,
    simulator,
)

VERB = "surprise"
ROWS = "surprise.csv"
LEAST_ERROR = 1e-12  # below it errors count as equal: a logarithm of zero says nothing
RESAMPLES, _BOOTSTRAP = 1000, 33


@dataclass(frozen=True)
class SurpriseSettings:
    """How much is lived through.

    trajectories: at most one of each episode.  before, after: frames that are scored before and after the changed one.
    seed: of starts and directions.
    """

    trajectories: int = 40
    before: int = 3
    after: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trajectories", 2), ("before", 0), ("after", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Test:
    """One change against the undisturbed trajectories, at the changed frame.

    error, plain: medians of the undisturbed and the changed errors.  p: of a paired t-test on the errors' logarithms,
    two-sided; holm: corrected for the number of changes.  effect: Cohen's d of the paired differences.
    auroc, interval: how often a changed frame has the larger error than an undisturbed one of any trajectory, with
    95 %; difference_auroc: likewise of plain differences of embeddings.  None: undefined, as nothing varies.
    """

    name: str
    kind: str
    plain: float
    error: float
    p: float | None
    holm: float | None
    effect: float | None
    auroc: float
    interval: tuple[float, float]
    difference_auroc: float


def fits(subject: Subject) -> str | None:
    """Why it cannot be measured; None: it can."""
    try:
        check_subject(subject)
    except LewmError as error:
        return str(error)
    return None


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Measure, or read what was found before; written into ``out``."""
    return surprised(subject, store, SurpriseSettings(12 if quick else 40, seed=seed), out, on_progress)


def surprised(
    subject: Subject, store: EpisodeStore, settings: SurpriseSettings, out: Path, on_progress: ProgressCallback | None
) -> Findings:
    """``surprise``, or what an earlier call found; written into ``out``."""
    findings = read_findings(out, VERB, asked_of(subject, store, settings)) if (out / ROWS).is_file() else None
    if findings is None:
        findings = surprise(subject, store, settings, out, on_progress)
        remark = another_kind(subject, store)
        findings = replace(findings, sentences=(*findings.sentences, *([remark] if remark else [])))
        from lewm.understand.surprise_figure import draw  # matplotlib takes its time

        write_findings(out, findings, draw)
    return findings


def surprise(
    subject: Subject,
    store: EpisodeStore,
    settings: SurpriseSettings | None = None,
    out: Path = Path("understanding"),
    on_progress: ProgressCallback | None = None,
) -> Findings:
    """Measure how a world model notices changes that its world cannot make; every frame's row goes to ``out``.

    An interrupted call goes on behind its finished trajectories. on_progress: counts trajectories.
    """
    settings = settings or SurpriseSettings()
    changes, foresight = check_subject(subject), Foresight(subject.model)
    extra("scipy.stats")  # its absence is said now, not after the work
    excerpt = _excerpt(foresight, settings)
    asked = asked_of(subject, store, settings)
    busy = f"Another process measures surprise in {out}. Wait, or take another --out."
    with leaving_no_empty_folders(out), only_writer(out / f".{VERB}.lock", busy):
        with RowJournal(_journal(out, asked), _rows_of_one(excerpt, foresight, changes)) as journal:
            rows = _live(subject, store, settings, excerpt, changes, foresight, journal, on_progress)
        write_rows(out / ROWS, rows)
        journal.remove()
    return found(subject, asked, rows, changes, excerpt, foresight.history, settings)


def check_subject(subject: Subject) -> tuple[Change, ...]:
    """The changes of the model's world. A model that predicts nothing, or whose world changes nothing, is refused."""
    Foresight(subject.model)
    if subject.world is None:
        problem = f"{subject.source} was trained in no world of ours, and nothing can be changed in a recording"
        raise ConfigError(f"{problem}. Take a model of a world with a simulator (`lewm envs`).")
    return changes_of(subject.world)


def asked_of(subject: Subject, store: EpisodeStore, settings: SurpriseSettings) -> dict[str, Any]:
    """The question that these arguments ask."""
    changes = changes_of(subject.world) if subject.world else ()
    described = [[c.name, c.kind, c.colour, c.distance] for c in changes]
    fields = {"trajectories": settings.trajectories, "before": settings.before, "after": settings.after}
    return question(VERB, subject, store, fields | {"seed": settings.seed, "changes": _plain(described)})


def _plain(values: list[list[Any]]) -> list[list[Any]]:
    """As JSON gives them back."""
    return [[list(value) if isinstance(value, tuple) else value for value in each] for each in values]


def _excerpt(foresight: Foresight, settings: SurpriseSettings) -> Excerpt:
    changed = foresight.history + settings.before
    return Excerpt(foresight.frame_skip, changed + settings.after, changed)


def _journal(out: Path, asked: dict[str, Any]) -> Path:
    """Where unfinished work is kept; how many trajectories are wanted changes none of them."""
    same = asked | {"settings": {k: v for k, v in asked["settings"].items() if k != "trajectories"}}
    return out / f"{VERB}-{json_digest(same)[:12]}.part.csv"


def _rows_of_one(excerpt: Excerpt, foresight: Foresight, changes: Sequence[Change]) -> int:
    return (excerpt.blocks + 1 - foresight.history) * (len(changes) + 1)


def _live(
    subject: Subject,
    store: EpisodeStore,
    settings: SurpriseSettings,
    excerpt: Excerpt,
    changes: Sequence[Change],
    foresight: Foresight,
    journal: RowJournal,
    on_progress: ProgressCallback | None,
) -> list[Row]:
    """The rows of as many trajectories as were asked for, or as there are."""
    assert subject.world is not None
    rows, done = list[Row](), 0
    with simulator(subject.world, foresight.image_size) as env:
        states = recorded_states(store, env)
        for episode in episodes_long_enough(store, excerpt):
            if done == settings.trajectories:
                break
            if on_progress:
                on_progress(done, settings.trajectories)
            known = journal.of(episode)
            if known is None:
                lived = matched(env, store, states, episode, excerpt, changes, settings.seed)
                known = [] if lived is None else list(_rows(lived, excerpt, foresight, changes))
                journal.add(episode, known)
            rows += known
            done += bool(known)
    if done < 2:
        need = f"Surprise takes 2 episodes or more with {excerpt.steps} actions and room for every change"
        raise DataError(f"{need}; {store.path} has {done}. Collect more, or ask for fewer frames before and after.")
    if on_progress:
        on_progress(done, done)
    return rows


def _rows(lived: Matched, excerpt: Excerpt, foresight: Foresight, changes: Sequence[Change]) -> Iterator[Row]:
    """Errors and differences of every frame that has a full history."""
    kinds = {UNDISTURBED: UNDISTURBED} | {change.name: change.kind for change in changes}
    plain = foresight.embed(lived.frames[UNDISTURBED])
    for name, frames in lived.frames.items():
        z_ND = plain
        if name != UNDISTURBED:  # until they part, trajectories have the same frames
            z_ND = plain.clone()
            z_ND[excerpt.changed :] = foresight.embed(frames[excerpt.changed :])
        errors = foresight.errors(z_ND, lived.actions, excerpt.frame_skip)
        if not np.isfinite(errors).all():
            raise DataError(f"The model's errors in episode {lived.episode} are not finite. Check its weights.")
        first = len(z_ND) - len(errors)
        differences = squared_distance(z_ND[first:], z_ND[first - 1 : -1])
        for number, (error, difference) in enumerate(zip(errors.tolist(), differences.tolist(), strict=True), first):
            offset = number - excerpt.changed
            step = number * excerpt.frame_skip
            yield Row(lived.episode, lived.row, name, kinds[name], offset, step, error, difference)


# -- what follows from the rows ------------------------------------------------------------------------------------


def found(
    subject: Subject,
    asked: dict[str, Any],
    rows: Sequence[Row],
    changes: Sequence[Change],
    excerpt: Excerpt,
    history: int,
    settings: SurpriseSettings,
) -> Findings:
    """Tests, curves and sentences of measured rows."""
    errors, differences = (_by_name(rows, quantity) for quantity in ("error", "difference"))
    place = settings.before
    tests = compare(errors, differences, place, changes, settings.seed)
    count = len(errors[UNDISTURBED])
    numbers = {
        "world": subject.world.name if subject.world else None,
        "trajectories": count,
        "offsets": list(range(-settings.before, settings.after + 1)),
        "frame_skip": excerpt.frame_skip,
        "history": history,
        "kinds": {UNDISTURBED: UNDISTURBED} | {change.name: change.kind for change in changes},
        "curves": {name: {"error": _band(errors[name]), "difference": _band(differences[name])} for name in errors},
        "tests": [vars(test) | {"interval": list(test.interval)} for test in tests],
    }
    files = {ROWS: "Every scored frame: what was changed, frames since then, error, difference of embeddings."}
    table = _table(tests, count)
    said = tuple(_sentences(tests, count, history, excerpt, settings, changes))
    return Findings(VERB, f"Surprise of {subject.name}", asked, (table,), said, numbers, files)


def _by_name(rows: Sequence[Row], quantity: str) -> dict[str, Array]:
    """By what was done: float64 (trajectories, frames)."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        values.setdefault(row.change, {}).setdefault(row.episode, []).append(getattr(row, quantity))
    return {name: np.array(list(episodes.values())) for name, episodes in values.items()}


def _band(values: Array) -> dict[str, list[float]]:
    """Quartiles over trajectories, at every frame."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    return {"low": low.tolist(), "median": median.tolist(), "high": high.tolist()}


def compare(
    errors: dict[str, Array], differences: dict[str, Array], place: int, changes: Sequence[Change], seed: int
) -> list[Test]:
    """Every change against the undisturbed trajectories, at the frame number ``place`` of the scored ones."""
    plain, plain_difference = errors[UNDISTURBED][:, place], differences[UNDISTURBED][:, place]
    paired = [_paired(errors[change.name][:, place], plain) for change in changes]
    defined = [p for p, _ in paired if p is not None]
    corrected = iter(holm(defined))
    tests = []
    for number, (change, (p, effect)) in enumerate(zip(changes, paired, strict=True)):
        changed = errors[change.name][:, place]
        area = auroc(changed, plain)
        interval = _interval(changed, plain, stream(seed, _BOOTSTRAP, number))
        medians = float(np.median(plain)), float(np.median(changed))
        adjusted = None if p is None else next(corrected)
        beside = auroc(differences[change.name][:, place], plain_difference)
        tests.append(Test(change.name, change.kind, *medians, p, adjusted, effect, area, interval, beside))
    return tests


def _paired(changed: Array, plain: Array) -> tuple[float | None, float | None]:
    """p and Cohen's d of the paired logarithms, (trajectories,) each; None where all differ by the same."""
    logs = [np.log(np.maximum(values, LEAST_ERROR)) for values in (changed, plain)]
    difference = logs[0] - logs[1]
    spread = float(difference.std(ddof=1))
    if spread < 1e-9 * max(1.0, float(np.abs(difference).max())):
        return None, None
    return float(extra("scipy.stats").ttest_rel(*logs).pvalue), float(difference.mean() / spread)


def auroc(positive: Array, negative: Array) -> float:
    """How often one of the first is larger than one of the second, ties half: the area under the ROC curve."""
    return float(_larger(positive, negative).mean())


def _larger(positive: Array, negative: Array) -> Array:
    return (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)


def _interval(positive: Array, negative: Array, rng: np.random.Generator) -> tuple[float, float]:
    """95 % of the area, by drawing trajectories again with their pairs."""
    larger, count = _larger(positive, negative), len(positive)
    drawn = rng.integers(count, size=(RESAMPLES, count))
    low, high = np.quantile([larger[np.ix_(again, again)].mean() for again in drawn], (0.025, 0.975))
    return float(low), float(high)


def _table(tests: Sequence[Test], count: int) -> Table:
    header = ("change", "error", "changed", "p", "p (Holm)", "d", "AUROC", "of difference")
    rows = tuple(
        (
            test.name,
            f"{test.plain:.3g}",
            f"{test.error:.3g}",
            *(NONE if p is None else f"{p:.2g}" for p in (test.p, test.holm)),
            NONE if test.effect is None else f"{test.effect:.2f}",
            f"{test.auroc:.3f} [{test.interval[0]:.3f}, {test.interval[1]:.3f}]",
            f"{test.difference_auroc:.3f}",
        )
        for test in tests
    )
    return Table(f"Surprise at the changed frame, {count} matched trajectories", header, rows)


def _sentences(
    tests: Sequence[Test],
    count: int,
    history: int,
    excerpt: Excerpt,
    settings: SurpriseSettings,
    changes: Sequence[Change],
) -> Iterator[str]:
    """What has to be said beside the table."""
    frames = f"{history} real frames" if history > 1 else "one real frame"
    yield (
        f"Error: squared distance of the next embedding from the one that was predicted from {frames} and the executed "
        f"actions, one block of {excerpt.frame_skip} steps ahead. Medians over trajectories, undisturbed and changed."
    )
    yield (
        "p: paired t-test on the logarithms of errors; d: Cohen's effect size of the pairs. AUROC: how often a changed "
        "frame has the larger error than an undisturbed one, with 95 % by bootstrap over trajectories."
    )
    yield "Of difference: the AUROC of the plain change of the embedding from one frame to the next."
    if count < settings.trajectories:
        yield f"Only {count} of the {settings.trajectories} trajectories: other episodes are too short or lack room."
    if any(test.p is None for test in tests):
        yield f"{NONE}: undefined, as all pairs differ by the same."
    if all(change.kind == "colour" for change in changes):
        yield "Only colours were changed: nobody has said how far this world's objects may be moved (register_changes)."
