"""A comparison as a figure: bars of success by world, with intervals, between the floor and the ceiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lewm.evaluate.comparison import CEILING, FLOOR, Compared, Contest, rates
from lewm.evaluate.stats import Rate
from lewm.files import completing

_BAR, _GAP = 0.34, 2.4  # the width of a bar, in inches, and the room between worlds, in bars
_NARROWEST, _WIDEST = 4.5, 12.0  # of a figure, in inches: where there are many bars, each is thinner
# Colours that stay apart for colour-blind readers, and in grey (Okabe and Ito's, lighter and darker in turn).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#B8A900", "#4B3F72")
_HATCHES = ("", "////", "....")  # of the second and third nine methods
_INK, _FAINT = "#222222", "#D9D9D9"
_STRICT: Any = {"marker": "D", "markersize": 4, "markerfacecolor": "white", "markeredgecolor": _INK}
_STYLE: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "lewm", "hatch.linewidth": 0.6}


def write_figure(path: Path, compared: Compared) -> None:
    """Write the figure, atomically, in the format that its name says."""
    names = list(dict.fromkeys(entry.name for contest in compared.contests for entry in contest.entries))
    units = sum(len(contest.entries) for contest in compared.contests) + _GAP * len(compared.contests)
    width = min(_WIDEST, max(_NARROWEST, 1 + _BAR * units))
    with matplotlib.rc_context(_STYLE):
        figure = Figure((width, 3.9), layout="constrained")
        axes = figure.add_subplot()
        _frame(axes)
        place, middles = 0.0, []
        for contest in compared.contests:
            middles.append(_draw(axes, contest, place, names))
            place += len(contest.entries) + _GAP
        axes.set_xticks(middles, [_label(contest) for contest in compared.contests])
        axes.set_xlim(-0.5 - 0.5 * _GAP, place - 0.5 - 0.5 * _GAP)
        handles = _legend(names, compared)
        rows = -(-len(handles) // max(1, int(figure.get_figwidth() / 1.5)))
        figure.legend(handles=handles, loc="outside upper left", ncols=-(-len(handles) // rows), frameon=False)
        kind = path.suffix.lower().removeprefix(".")
        with completing(path) as temporary:
            metadata = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else None
            figure.savefig(temporary, format=kind, dpi=200, metadata=metadata)


def _frame(axes: Axes) -> None:
    axes.set_ylim(0, 104)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("success, % (paper's protocol)", color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=_INK)


def _draw(axes: Axes, contest: Contest, place: float, names: list[str]) -> float:
    """The bars of one contest from ``place`` on; returns the middle of them."""
    for number, entry in enumerate(contest.entries):
        found = rates(entry.outcomes)
        _bar(axes, place + number, found["paper"], found["strict"], names.index(entry.name))
    first, last = place - 0.65, place + len(contest.entries) - 0.35
    for name, outcomes in contest.bounds().items():
        axes.hlines(100 * rates(outcomes)["paper"].value, first, last, colors=_INK, **_bound_style(name))
    return place + (len(contest.entries) - 1) / 2


def _bar(axes: Axes, x: float, rate: Rate, strict: Rate, number: int) -> None:
    low, high = (100 * bound for bound in rate.interval)
    value = 100 * rate.value
    axes.bar(x, value, 0.84, **_bar_style(number))
    error = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar(x, value, error, ecolor=_INK, elinewidth=1.1, capsize=2.2, fmt="none")
    if strict.total:
        axes.plot(x, 100 * strict.value, **_STRICT)


def _bar_style(number: int) -> dict[str, Any]:
    colour = _COLOURS[number % len(_COLOURS)]
    hatch = _HATCHES[number // len(_COLOURS) % len(_HATCHES)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def _bound_style(name: str) -> dict[str, Any]:
    return {"linestyles": "dashed" if name == FLOOR else "dotted", "linewidth": 1.2}


def _label(contest: Contest) -> str:
    world, asked = contest.title.split(": ", 1)
    return f"{world}\n{asked}"


def _legend(names: list[str], compared: Compared) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = []
    handles += [Patch(label=name, **_bar_style(number)) for number, name in enumerate(names)]
    strict: dict[str, Any] = {
        "color": "none",
        "marker": "D",
        "markersize": 4,
        "markerfacecolor": "white",
        "markeredgecolor": _INK,
    }
    handles.append(Line2D([], [], label="strict protocol", **strict))
    drawn = {name for contest in compared.contests for name in contest.bounds()}
    for name in (FLOOR, CEILING):
        if name in drawn:
            style = _bound_style(name)
            handles.append(Line2D([], [], color=_INK, label=name, linestyle=style.pop("linestyles"), **style))
    return handles
