"""What probes found, as tables, sentences and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lewm.data.generate import DEMONSTRATION
from lewm.data.store import EpisodeStore
from lewm.envs.registry import EnvEntry
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.understand.episodes import another_kind
from lewm.understand.figures import COLOURS, FAINT, GREY, INK, styled
from lewm.understand.findings import Findings
from lewm.understand.published import PaperRow, paper_rows
from lewm.understand.subject import Subject
from lewm.understand.targets import Target, Truth
from lewm.understand.views import ViewResult

KINDS = ("linear", "mlp")
_COUNTS = {1: "one embedding", 2: "two embeddings", 3: "three embeddings", 4: "four embeddings"}
_MODELS = COLOURS[:6]  # the paper's are grey
_LEAST = 3e-5  # 1 - r that is drawn no further to the right
_ROUNDED = 0.9995  # what the paper's 1.000 is at least


def probe_findings(
    asked: dict[str, Any],
    models: Sequence[tuple[Subject, tuple[ViewResult, ...]]],
    truth: Truth,
    store: EpisodeStore,
    world: EnvEntry | None,
    splits: int,
) -> Findings:
    """All that ``probe`` found. models: with what each view of them gave."""
    names = _names([subject for subject, _ in models])
    numbers = {
        "splits": splits,
        "frames": store.num_frames,
        "episodes": store.num_episodes,
        "replays": bool(store.attributes.get("demonstrations")),
        "demonstrations": len(np.unique(models[0][1][0].view.groups)) if DEMONSTRATION in store.columns else None,
        "invisible": int((~truth.visible).sum()),
        "models": [
            {
                "name": name,
                "method": subject.model.settings.NAME,
                "source": subject.source,
                "digest": subject.digest,
                "embedding": list(subject.encoder.shape),
                "history": subject.model.history,
                "views": [_view_numbers(result, truth.targets) for result in results],
            }
            for name, (subject, results) in zip(names, models, strict=True)
        ],
        "paper": {
            target.name: [_paper_numbers(row) for row in rows]
            for target in truth.targets
            if (rows := paper_rows(world.name if world else None, target))
        },
    }
    title = f"Physical quantities in the embeddings of {names[0]}"
    said = tuple(_sentences(numbers, asked["settings"], truth, another_kind(models[0][0], store)))
    return Findings("probe", title, asked, tuple(_tables(numbers, truth.targets)), said, numbers, {})


def _names(subjects: Sequence[Subject]) -> list[str]:
    """Of models, which stay apart where two are called the same."""
    names = [subject.name for subject in subjects]
    return [
        name if names.count(name) == 1 else f"{name} {subject.digest[:6]}"
        for name, subject in zip(names, subjects, strict=True)
    ]


def _view_numbers(result: ViewResult, targets: Sequence[Target]) -> dict[str, Any]:
    """One view of a model: means over splits, and their standard deviations."""
    found = {
        target.name: {kind: _over_splits([each[target.name][kind] for each in result.measured]) for kind in KINDS}
        for target in targets
    }
    frames, episodes = len(result.view.places), len(np.unique(result.view.episodes))
    return {
        "embeddings": result.view.frames,
        "inputs": result.size,
        "frames": frames,
        "episodes": episodes,
        "found": found,
    }


def _over_splits(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name in ("mse", "r", "error"):
        defined = [each[name] for each in measured if each[name] is not None]
        numbers[name] = float(np.mean(defined)) if defined else None
        numbers[f"{name}_std"] = float(np.std(defined, ddof=1)) if len(defined) > 1 else None
    columns = zip(*(each["r_each"] for each in measured), strict=True)
    defined_each = ([r for r in column if r is not None] for column in columns)
    numbers["r_each"] = [float(np.mean(column)) if column else None for column in defined_each]
    return numbers


def _paper_numbers(row: PaperRow) -> dict[str, Any]:
    probes = {"linear": row.linear, "mlp": row.mlp}
    return {"model": row.model} | {k: {"mse": p.mse, "mse_std": p.spread, "r": p.r} for k, p in probes.items()}


# -- tables ----------------------------------------------------------------------------------------------------------


def _tables(numbers: dict[str, Any], targets: Sequence[Target]) -> Iterator[Table]:
    """One table for each number of embeddings; the paper's rows stand where it probed one."""
    for counted in dict.fromkeys(view["embeddings"] for model in numbers["models"] for view in model["views"]):
        shown = [
            (model["name"], view)
            for model in numbers["models"]
            for view in model["views"]
            if view["embeddings"] == counted
        ]
        header = ("property", "model", "MSE, linear", "r, linear", "MSE, MLP", "r, MLP", "typical error, MLP")
        rows = []
        for target in targets:
            rows += [_row(target, name, view["found"][target.name]) for name, view in shown]
            published = numbers["paper"].get(target.name, ()) if counted == 1 else ()
            for row in published:
                rows.append(("", f"paper's {row['model']}", *_cells(row["linear"]), *_cells(row["mlp"]), ""))
        view = shown[0][1]
        what = f"{view['frames']:,} frames of {view['episodes']:,} episodes"
        yield Table(f"Read from {_called(counted)}: {what}", header, tuple(rows))


def _row(target: Target, name: str, found: dict[str, Any]) -> tuple[str, ...]:
    error = found["mlp"]["error"]
    unit = target.unit if target.unit == "°" else f" {target.unit}".rstrip()
    typical = NONE if error is None else f"{error:.3g}{unit}"
    return (target.name, name, *_cells(found["linear"]), *_cells(found["mlp"]), typical)


def _cells(probe: dict[str, Any]) -> tuple[str, str]:
    """MSE with its spread, and r."""
    mse, spread, r = probe["mse"], probe["mse_std"], probe["r"]
    error = NONE if mse is None else f"{mse:.4f}" + ("" if spread is None else f" ± {spread:.4f}")
    return error, NONE if r is None else f"{r:.4f}" if "r_each" in probe else f"{r:.3f}"


def _called(count: int) -> str:
    return _COUNTS.get(count, f"{count} embeddings")


# -- sentences -------------------------------------------------------------------------------------------------------


def _sentences(numbers: dict[str, Any], settings: dict[str, Any], truth: Truth, kind: str | None) -> Iterator[str]:
    splits = numbers["splits"]
    yield (
        "Two probes read frozen embeddings: ridge regression in closed form "
        f"(penalty {settings['ridge']:g}), and an MLP with two hidden layers of 256."
    )
    times = "once" if splits == 1 else f"{splits} times, each with new MLPs; ± is the standard deviation over these"
    of = "demonstrations, with all their replays," if numbers["demonstrations"] else "episodes"
    yield f"Of the {of} 80 % train a probe, 10 % say when an MLP is to stop, 10 % test it. They were split {times}."
    yield (
        "MSE is of z-scored numbers, so that 1 is what the mean would give. r is Pearson's, the mean over a property's "
        "numbers. The typical error is the median distance or turn."
    )
    if any(model["views"][1:] for model in numbers["models"]):
        yield (
            "What one frame does not show, as velocities, several may: the second table reads from the embeddings "
            "that the predictor sees, side by side."
        )
    for model in numbers["models"]:
        if model["history"] not in (view["embeddings"] for view in model["views"]):
            yield f"Too few episodes are as long as what {model['name']}'s predictor sees, {_called(model['history'])}."
    if numbers["paper"]:
        yield (
            "The paper's rows are from its own data and probes of one embedding. It does not say over what its ± is; "
            "angles it read as numbers with a seam."
        )
    if numbers["invisible"]:
        share = f"{numbers['invisible']:,} of {numbers['frames']:,} frames"
        yield f"Left out: {share}, which show something outside of the picture."
    if any(len(model["embedding"]) > 1 for model in numbers["models"]):
        how = "averaged" if settings["tokens"] == "mean" else "put side by side"
        tokens = ", ".join(model["name"] for model in numbers["models"] if len(model["embedding"]) > 1)
        yield f"The tokens of a frame are {how} for probing: {tokens}."
    if kind:
        yield kind
    if count := numbers["demonstrations"]:
        yield f"These episodes are noisy replays of {count} demonstrations, none of which is in two parts."
    elif numbers["replays"]:
        yield (
            "These episodes are noisy replays of demonstrations, with several of each: episodes of the test part "
            "resemble some of the training part, though none is in both. The dataset does not say which they replay."
        )
    yield from _undefined(numbers, truth)


def _undefined(numbers: dict[str, Any], truth: Truth) -> Iterator[str]:
    """What r is not defined for: numbers that do not vary in these episodes."""
    for target in truth.targets:
        found = numbers["models"][0]["views"][0]["found"][target.name]["linear"]
        each = found["r_each"]
        missing = sum(r is None for r in each)
        if missing:
            of = "" if missing == len(each) else f" in {missing} of its {len(each)} numbers, which are left out"
            constant = "nothing varies there" if found["mse"] is None or of else "what the probe reads does not vary"
            yield f"{target.name}: r is undefined{of}, because {constant} in the parts of these episodes."


# -- figure ----------------------------------------------------------------------------------------------------------


@styled
def draw(findings: Findings) -> Figure:
    """r of every property, on an axis that spreads what is near 1: hollow linear, filled MLP, grey the paper's LeWM.

    The paper's 1.000 is drawn where it begins, at 0.9995.
    """
    models, paper = findings.numbers["models"], findings.numbers["paper"]
    counts = list(dict.fromkeys(view["embeddings"] for model in models for view in model["views"]))
    names = list(models[0]["views"][0]["found"])
    height = 1.5 + 0.34 * len(names)
    figure = Figure((2.6 + 3.4 * len(counts), height), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, counts, strict=True):
        _frame(axes, names, f"from {_called(count)}")
        for number, model in enumerate(models):
            for view in (view for view in model["views"] if view["embeddings"] == count):
                shift = 0.22 * (number - (len(models) - 1) / 2)
                _dots(axes, names, view["found"], _MODELS[number % len(_MODELS)], "o", shift)
        if count == 1:
            _dots(axes, names, {name: rows[-1] for name, rows in paper.items()}, GREY, "D", 0.0, _ROUNDED)
    figure.legend(handles=_legend(models, bool(paper)), loc="outside lower center", ncols=4)
    return figure


def _frame(axes: Axes, names: list[str], title: str) -> None:
    ticks = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
    axes.set_xticks([_place(r) for r in ticks], [f"{r:g}" for r in ticks])
    axes.set_xlim(-0.15, _place(1.0) + 0.1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("r on test episodes", color=INK)
    axes.set_title(title, color=INK)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)


def _place(r: float) -> float:
    """Where r is drawn: decades of 1 - r to the right; nothing left of 0."""
    return float(-np.log10(min(1.0, max(_LEAST, 1.0 - r))))


def _dots(
    axes: Axes, names: list[str], found: dict[str, Any], colour: str, marker: str, shift: float, most: float = 1.0
) -> None:
    for row, name in enumerate(names):
        for kind in KINDS:
            r = found[name][kind]["r"] if name in found else None
            if r is not None:
                face = "white" if kind == "linear" else colour
                style: Any = {"marker": marker, "markersize": 5, "markerfacecolor": face, "markeredgecolor": colour}
                axes.plot(_place(min(r, most)), row + shift, linestyle="none", clip_on=False, **style)


def _legend(models: Sequence[dict[str, Any]], paper: bool) -> list[Line2D]:
    def handle(label: str, colour: str, marker: str, face: str) -> Line2D:
        style: Any = {"markersize": 5, "markerfacecolor": face, "markeredgecolor": colour}
        return Line2D([], [], linestyle="none", marker=marker, label=label, **style)

    handles = [handle("linear", INK, "o", "white"), handle("MLP", INK, "o", INK)]
    if len(models) > 1:
        handles += [handle(m["name"], c, "o", c) for m, c in zip(models, _MODELS * 9, strict=False)]
    return [*handles, handle("the paper's LeWM", GREY, "D", GREY)] if paper else handles
