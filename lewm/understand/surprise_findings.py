"""What follows from the rows of matched trajectories: tests, curves, a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lewm.errors import ConfigError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.evaluate.stats import holm
from lewm.extras import import_extra
from lewm.rng import stream
from lewm.types import Array
from lewm.understand.findings import Findings
from lewm.understand.subject import Subject
from lewm.understand.surprise_rows import Row
from lewm.understand.trajectories import UNDISTURBED, Change, Excerpt

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

    plain, error: medians of the undisturbed and the changed errors.  p: of a paired t-test on the errors' logarithms,
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


def surprise_findings(
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
    return float(import_extra("scipy.stats", "understand").ttest_rel(*logs).pvalue), float(difference.mean() / spread)


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
