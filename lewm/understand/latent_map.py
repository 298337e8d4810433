"""`lewm understand map`: how the latent space lays out a grid of states, which the world's simulator draws.

Beside the grid are the embeddings' two main components and scikit-learn's t-SNE of them (PCA first). Pictures in a
plane may mislead, so two numbers say how faithful the embeddings themselves are, and the plane:

    rank correlation    Spearman's, of distances on the grid and between embeddings, over all pairs of states
    neighbours kept     of the up to 8 states around one, the share that is among as many nearest embeddings
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lewm.checked import Checked, to_dict
from lewm.data.store import EpisodeStore
from lewm.envs.registry import make_env
from lewm.errors import ConfigError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.extras import import_extra
from lewm.files import completing
from lewm.types import Array, ProgressCallback
from lewm.understand.figures import FAINT, canvas, colours_of, styled
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.looking import look, remarks_on
from lewm.understand.sheets import Grid, Sheet, make_grid, own_sheet, sheets_of
from lewm.understand.subject import Subject, question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "map"
COST = "seconds"
SHOWN_STATES = 5  # pictures each way
_COMPONENTS = 50  # of PCA, before t-SNE


@dataclass(frozen=True)
class MapSettings(Checked):
    """What is mapped. x, y: numbers of the state, by name; None: what the world is usually mapped by."""

    SECTION: ClassVar[str] = "map"

    grid: int = 15  # States each way.
    x: str | None = None
    y: str | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(4 <= self.grid <= 60, "grid", "between 4 and 60 states each way")
        self._require((self.x is None) == (self.y is None), "x", "given together with y")
        self._require(self.x is None or self.x != self.y, "y", "another number than x")
        ranged = self.x_range is not None or self.y_range is not None
        self._require(self.x is not None or not ranged, "x_range", "given together with x and y")


def fits(subject: Subject) -> str | None:
    """Why there is no map of it; None: there is."""
    if subject.world is None:
        return "nobody knows which world to draw states of"
    if not sheets_of(subject.world):
        return f"which numbers of {subject.world.name}'s state to vary has to be said: --x NAME --y NAME"
    return None


def latent_map(
    subject: Subject, settings: MapSettings, out: Path | None = None, on_progress: ProgressCallback | None = None
) -> Findings:
    """Draw, embed and lay out the sheets of a model's world. out: where pictures of some of the states go."""
    if subject.world is None:
        raise ConfigError(f"{subject.source} does not say which world it was trained in, so no states can be drawn.")
    with contextlib.closing(make_env(subject.world.name, subject.model.image_size, "state")) as env:
        if settings.x is not None and settings.y is not None:
            sheets: tuple[Sheet, ...] = (own_sheet(env, settings.x, settings.y, settings.x_range, settings.y_range),)
        else:
            sheets = sheets_of(subject.world)
        if not sheets:
            names = ", ".join(env.state_names)
            raise ConfigError(f"Name two numbers of {subject.world.name}'s state with --x and --y, of {names}.")
        grids = [make_grid(env, sheet, settings.grid, settings.seed) for sheet in sheets]
        frames = [env.render_states(grid.states) for grid in grids]
    z = look(subject, np.concatenate(frames), on_progress)
    parts = np.split(z, np.cumsum([len(grid.states) for grid in grids])[:-1])
    charts = [_chart(grid, part, settings.seed) for grid, part in zip(grids, parts, strict=True)]
    files = {}
    if out is not None:
        pictures = [_picked(grid, part) for grid, part in zip(grids, frames, strict=True)]
        shown = "; ".join(sheet.name for sheet in sheets)
        files["map-states.png"] = f"Some of the states, as the simulator draws them: {shown}"
        _write_pictures(out / "map-states.png", pictures)
    return Findings(
        VERB,
        "How the latent space lays out states",
        _asked(subject, settings),
        (_table(charts),),
        (*_SENTENCES, *_without_tsne(charts), *remarks_on(subject)),
        {"sheets": charts, "model": subject.name},
        files,
    )


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Find, or read what was found before; written into ``out``."""
    del store  # the simulator draws what is looked at
    return mapped(subject, MapSettings(grid=10 if quick else 15, seed=seed), out, on_progress)


def mapped(subject: Subject, settings: MapSettings, out: Path, on_progress: ProgressCallback | None) -> Findings:
    """``latent_map``, or what an earlier call found; written into ``out``."""
    found = read_findings(out, VERB, _asked(subject, settings))
    if found is None:
        found = latent_map(subject, settings, out, on_progress)
        write_findings(out, found, draw)
    return found


def _asked(subject: Subject, settings: MapSettings) -> dict[str, Any]:
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in to_dict(settings).items()}
    return question(VERB, subject, None, plain)


_SENTENCES = (
    "Rank correlation: Spearman's, of distances on the grid and between embeddings, over all pairs of states.",
    "Neighbours kept: of the up to 8 states around one, the share that is among as many nearest embeddings.",
    "Both are of the embeddings themselves but where the table says plane; by luck: as a shuffled grid would have it.",
)


def _without_tsne(charts: list[dict[str, Any]]) -> tuple[str, ...]:
    without = [chart for chart in charts if "t-SNE" not in chart["planes"]]
    if any(chart["rank_correlation"] is None for chart in without):
        return ("There is no t-SNE where all states have the same embedding.",)
    missing = bool(without)
    return ("There is no t-SNE: it takes scikit-learn. Install it with: pip install 'lewm[understand]'",) * missing


# -- numbers -------------------------------------------------------------------------------------------------------


def _chart(grid: Grid, z_ND: Array, seed: int) -> dict[str, Any]:
    """A sheet's numbers, as JSON."""
    components, explained = main_components(z_ND)
    planes = {"PCA": components[:, :2]}
    if (unfolded := tsne(components, seed)) is not None:
        planes["t-SNE"] = unfolded
    sheet = grid.sheet
    return {
        "name": sheet.name,
        "axes": [axis.label for axis in (sheet.x, sheet.y)],
        "places": np.stack([axis.values(grid.size)[step] for axis, step in _both(grid)], axis=-1).tolist(),
        "steps": grid.steps.tolist(),
        "size": grid.size,
        "planes": {name: np.round(plane, 4).tolist() for name, plane in planes.items()},
        "explained": float(explained[:2].sum()),
        "rank_correlation": rank_correlation(grid, z_ND),
        "neighbours": {"embedding": neighbours_kept(grid, z_ND)}
        | {name: neighbours_kept(grid, plane) for name, plane in planes.items()},
        "luck": float(_around(grid).sum(1).mean() / (len(z_ND) - 1)),
    }


def main_components(z_ND: Array) -> tuple[Array, Array]:
    """PCA: the first components (N, C) of embeddings, signs fixed, and their shares of the variance (C,)."""
    centred = z_ND - z_ND.mean(0)
    left, scale, directions = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign(directions[np.arange(len(directions)), np.abs(directions).argmax(1)])
    share = np.square(scale) / max(np.square(scale).sum(), np.finfo(float).tiny)
    return (left * scale * signs)[:, :_COMPONENTS], share[:_COMPONENTS]


def tsne(components_NC: Array, seed: int) -> Array | None:
    """scikit-learn's t-SNE (N, 2) of main components; None where it is not installed, or where all are the same."""
    scale = components_NC.std()
    if not scale > 0:  # scikit-learn would crash
        return None
    try:
        manifold = import_extra("sklearn.manifold", "understand")
    except ConfigError:
        return None
    perplexity = min(30.0, (len(components_NC) - 1) / 3)
    made = manifold.TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed)
    return np.asarray(made.fit_transform((components_NC / scale).astype(np.float32)), np.float64)


def _both(grid: Grid) -> Sequence[tuple[Any, Array]]:
    return ((grid.sheet.x, grid.steps[:, 0]), (grid.sheet.y, grid.steps[:, 1]))


def distances(z_ND: Array) -> Array:
    """Euclidean, between all of N points: (N, N)."""
    squares = np.square(z_ND).sum(-1)
    return np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * z_ND @ z_ND.T, 0))


def rank_correlation(grid: Grid, z_ND: Array) -> float | None:
    """Spearman's, of distances on the grid and between embeddings; None where embeddings are all the same."""
    spearmanr = import_extra("scipy.stats", "understand").spearmanr
    upper = np.triu_indices(len(z_ND), 1)
    on_grid, latent = np.linalg.norm(grid.between(), axis=-1)[upper], distances(z_ND)[upper]
    return float(spearmanr(on_grid, latent).statistic) if np.ptp(latent) > 0 else None


def _around(grid: Grid) -> Array:
    """Which states are around which, bool (N, N)."""
    return grid.between().max(-1) == 1


def neighbours_kept(grid: Grid, z_ND: Array) -> float:
    """Of the k states around each on the grid, the share that is among its k nearest embeddings; the mean over all."""
    around, apart = _around(grid), distances(z_ND)
    np.fill_diagonal(apart, np.inf)
    rank = apart.argsort(1, kind="stable").argsort(1)
    kept = [(rank[i][around[i]] < around[i].sum()).mean() for i in range(len(around)) if around[i].any()]
    return float(np.mean(kept))


# -- what people see -----------------------------------------------------------------------------------------------


def _table(charts: list[dict[str, Any]]) -> Table:
    kept_in = ("neighbours kept", "in PCA's plane", "in t-SNE's plane", "by luck")
    header = ("varied", "states", "rank correlation", *kept_in)
    rows = []
    for chart in charts:
        correlation, kept = chart["rank_correlation"], chart["neighbours"]
        shares = (f"{kept[name]:.0%}" if name in kept else NONE for name in ("embedding", "PCA", "t-SNE"))
        shown = NONE if correlation is None else f"{correlation:.3f}"
        rows.append((chart["name"], str(len(chart["steps"])), shown, *shares, f"{chart['luck']:.0%}"))
    return Table("Faithfulness of the map", header, tuple(rows))


@styled
def draw(findings: Findings) -> Figure:
    """A row for each sheet: the grid, and where its states lie in both planes; lines join neighbours."""
    sheets = findings.numbers["sheets"]
    figure, rows = canvas(len(sheets), 1 + max(len(chart["planes"]) for chart in sheets))
    for chart, (first, *others) in zip(sheets, rows, strict=True):
        steps = np.array(chart["steps"])
        colours = colours_of(steps / max(1, chart["size"] - 1))
        first.set(xlabel=chart["axes"][0], ylabel=chart["axes"][1], title=f"states: {chart['name']}")
        titles = {"PCA": f"PCA ({chart['explained']:.0%} of the variance)", "t-SNE": "t-SNE"}
        planes = {"": np.array(chart["places"])} | {name: np.array(p) for name, p in chart["planes"].items()}
        lines = _lines(steps)
        for axes, (name, points) in zip((first, *others), planes.items(), strict=True):
            for one, other in lines:
                axes.plot(*points[[one, other]].T, color=FAINT, linewidth=0.6, zorder=1)
            axes.scatter(points[:, 0], points[:, 1], c=colours, s=14, zorder=2)
            if name:
                axes.set(title=titles[name], xticks=[], yticks=[])
        first.invert_yaxis()  # as on the screen
    return figure


def _lines(steps: Array) -> list[tuple[int, int]]:
    """Pairs of states next to each other on the grid, across or down."""
    place = {tuple(step): number for number, step in enumerate(steps.tolist())}
    ahead = ((1, 0), (0, 1))
    return [
        (number, place[other])
        for (x, y), number in place.items()
        for dx, dy in ahead
        if (other := (x + dx, y + dy)) in place
    ]


def _picked(grid: Grid, frames: Array) -> Array:
    """Some of a sheet's frames as one picture (H, W, 3), laid out like the grid; white where there is no such state."""
    count, side = min(SHOWN_STATES, grid.size), frames.shape[1]
    wanted = np.linspace(0, grid.size - 1, count).astype(int)
    place = {tuple(step): number for number, step in enumerate(grid.steps.tolist())}
    white = np.full((side, side, 3), 255, np.uint8)
    rows = [[frames[place[x, y]] if (x, y) in place else white for x in wanted.tolist()] for y in wanted.tolist()]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _write_pictures(path: Path, pictures: list[Array], width: int = 420) -> None:
    """Pictures side by side, each so many pixels wide."""
    from PIL import Image

    shown = [np.asarray(Image.fromarray(picture).resize((width, width))) for picture in pictures]
    gap = np.full((width, 12, 3), 255, np.uint8)
    strip = np.concatenate([part for picture in shown for part in (picture, gap)][:-1], axis=1)
    with completing(path) as temporary:
        Image.fromarray(strip).save(temporary, format="PNG")
