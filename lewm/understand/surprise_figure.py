"""Surprise as a figure: what the model did not expect, what merely changed, and how well each tells a change."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lewm.understand.figures import COLOURS, FAINT, INK, styled
from lewm.understand.findings import Findings
from lewm.understand.trajectories import UNDISTURBED

# By what was done, near ones from small to large.
_BY_KIND = {UNDISTURBED: INK, "colour": COLOURS[1], "far": COLOURS[5]}
_NEAR = (COLOURS[4], COLOURS[0], COLOURS[8])
_SMALLEST = 1e-6  # drawn for an error of zero


@styled
def draw(findings: Findings) -> Figure:
    """Curves of errors and of differences with quartiles, and the areas under the ROC curve of both."""
    numbers = findings.numbers
    colours = _colours(numbers)
    figure = Figure((10.5, 3.9), layout="constrained")
    error, difference, areas = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    _curves(error, numbers, "error", colours, "squared prediction error (median, quartiles)")
    _curves(difference, numbers, "difference", colours, "squared change of the embedding")
    difference.sharey(error)
    _areas(areas, numbers, colours)
    handles, labels = error.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def shown(numbers: dict[str, Any]) -> list[str]:
    """What is drawn as curves: the undisturbed trajectories, and the changes of one object, the first that there is."""
    first = next(name for name in numbers["kinds"] if name != UNDISTURBED).split(":")[0]
    return [name for name in numbers["kinds"] if name == UNDISTURBED or name.startswith(f"{first}:")]


def _colours(numbers: dict[str, Any]) -> dict[str, str]:
    """Of each change; near ones count anew for each object, and beyond three they begin again."""
    colours, seen = dict[str, str](), dict[str, int]()
    for name, kind in numbers["kinds"].items():
        if kind == "near":
            place = seen.setdefault(name.split(":")[0], 0)
            colours[name] = _NEAR[place % len(_NEAR)]
            seen[name.split(":")[0]] = place + 1
        else:
            colours[name] = _BY_KIND[kind]
    return colours


def _curves(axes: Axes, numbers: dict[str, Any], quantity: str, colours: dict[str, str], title: str) -> None:
    offsets = numbers["offsets"]
    for name in shown(numbers):
        band = {
            key: [max(value, _SMALLEST) for value in values]
            for key, values in numbers["curves"][name][quantity].items()
        }
        plain = name == UNDISTURBED
        # Until the change all are the same: there, one band is enough.
        since = 0 if plain else max(0, offsets.index(0) - 1)
        sides = offsets[since:], band["low"][since:], band["high"][since:]
        axes.fill_between(*sides, color=colours[name], alpha=0.15, linewidth=0)
        style: dict[str, Any] = {"linewidth": 1.8 if plain else 1.3, "zorder": 4 if plain else 3}
        axes.plot(
            offsets[since:],
            band["median"][since:],
            color=colours[name],
            label=name,
            marker="o",
            markersize=2.6,
            **style,
        )
    axes.axvline(0, color=INK, linewidth=0.8, linestyle="dotted")
    axes.set_yscale("log")
    axes.set_title(title, color=INK, loc="left")
    axes.set_xlabel(f"frames since the change ({numbers['frame_skip']} steps each)", color=INK)
    _plain(axes, "y")


def _areas(axes: Axes, numbers: dict[str, Any], colours: dict[str, str]) -> None:
    tests = list(reversed(numbers["tests"]))
    for place, test in enumerate(tests):
        low, high = test["interval"]
        area, colour = test["auroc"], colours[test["name"]]
        error = [[max(0.0, area - low)], [max(0.0, high - area)]]
        axes.plot([test["difference_auroc"], area], [place, place], color=FAINT, linewidth=2, zorder=1)
        axes.errorbar(area, place, xerr=error, color=colour, marker="o", markersize=5, capsize=2, elinewidth=1)
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": colour, "zorder": 1.5}
        axes.plot(test["difference_auroc"], place, marker="o", markersize=7, linestyle="none", **hollow)
    axes.axvline(0.5, color=INK, linewidth=0.8, linestyle="dotted")
    axes.set_yticks(range(len(tests)), [test["name"] for test in tests])
    axes.set_ylim(-0.6, len(tests) - 0.4)
    axes.set_xlim(min(0.4, *(test["difference_auroc"] - 0.03 for test in tests)), 1.02)
    axes.set_title("● prediction   ○ difference", color=INK, loc="left")
    axes.set_xlabel("AUROC at the changed frame", color=INK)
    _plain(axes, "x")


def _plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, colors=INK, which="both")
