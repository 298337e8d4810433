"""What the figures of findings share: a style for papers, and colours that colour-blind readers tell apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lewm.types import Array

# Okabe and Ito's, as `lewm compare` has them.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#B8A900", "#4B3F72")
INK, FAINT, GREY = "#222222", "#D9D9D9", COLOURS[6]
# Of the corners (left, right) x (low, high) of a sheet of states; what lies between is mixed.
_CORNERS = np.array([[[0.00, 0.25, 0.55], [0.00, 0.75, 0.75]], [[0.80, 0.20, 0.05], [1.00, 0.82, 0.15]]])
_STYLE: Any = {"font.size": 9, "axes.titlesize": 9, "legend.frameon": False}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing function, in the style of all; settings of matplotlib are nobody's for long."""

    @functools.wraps(draw)
    def drawn(*given: Any, **named: Any) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*given, **named)

    return drawn


def canvas(rows: int, columns: int, width: float = 3.2, height: float = 3.0) -> tuple[Figure, list[list[Axes]]]:
    """A figure of so many charts, each of so many inches; no state is kept in pyplot."""
    figure = Figure((width * columns, height * rows), layout="constrained")
    charts = figure.subplots(rows, columns, squeeze=False)
    for axes in charts.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
        axes.set_axisbelow(True)
    return figure, [list(row) for row in charts]


def colours_of(places_N2: Array) -> Array:
    """A colour (N, 3) for each place in the unit square (N, 2), which changes evenly both ways."""
    x, y = (places_N2[:, i, None] for i in (0, 1))
    (low_left, high_left), (low_right, high_right) = _CORNERS
    return (1 - x) * ((1 - y) * low_left + y * high_left) + x * ((1 - y) * low_right + y * high_right)
