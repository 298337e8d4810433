"""`lewm understand landscape`: how far latent distances tell near from far; a search for a plan is blind beyond that.

Squared distances between embeddings of frames that are some action blocks apart in one episode, in parts of the mean
one between frames of different episodes. A distance that soon comes to 1 says nothing about the way to a farther goal.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.evaluate.comparison_tables import Table
from lewm.types import Array, ProgressCallback
from lewm.understand.figures import COLOURS, FAINT, INK, canvas, styled
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.looking import ALL_SAME, between_episodes, paths, remarks_on
from lewm.understand.subject import Subject, embeddings, question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "landscape"
COST = "the embeddings of the episodes"
BLOCKS = (1, 2, 3, 4, 5, 7, 10, 15, 20)
FEWEST_PAIRS = 20  # that a row rests on
FLAT = 0.1  # of what is far: distances that grow by no more than that are called flat
_FRAMES = 8  # of each episode, spread evenly, for what is far


def fits(subject: Subject) -> str | None:
    """Why it cannot be measured; None: it can."""
    del subject  # whatever encodes has distances
    return None


def landscape(subject: Subject, store: EpisodeStore, on_progress: ProgressCallback | None = None) -> Findings:
    """Distances by the blocks between frames, over all episodes."""
    with embeddings(subject, store, on_progress) as features:
        walked = [z.double().numpy() for z in paths(subject, store, features)]
    rows = by_blocks(walked)
    highest = max(row["mean"] for row in rows)
    flat = next(row["blocks"] for row in rows if row["mean"] > highest - FLAT)
    last = rows[-1]["blocks"]
    skip = subject.model.frame_skip
    sentences = [
        f"1 is the mean squared distance between frames of different episodes; a block is {skip} environment steps.",
        f"From {flat} blocks on distances grow by less than {FLAT:g}: they no longer tell how far a goal is."
        if flat < last
        else f"Up to {last} blocks, as far as was looked, distances grow: they tell how far a goal is.",
        *remarks_on(subject),
    ]
    header = ("blocks apart", "pairs", "mean distance", "middle half", "farther than other episodes")
    cells = tuple(
        (
            str(row["blocks"]),
            str(row["pairs"]),
            f"{row['mean']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['farther']:.0%}",
        )
        for row in rows
    )
    table = Table(f"Latent distance along {len(walked)} episodes", header, cells)
    asked, numbers = question(VERB, subject, store, {}), {"rows": rows, "flat_from": flat, "model": subject.name}
    return Findings(VERB, "How far distances reach", asked, (table,), tuple(sentences), numbers, {})


def by_blocks(walked: list[Array]) -> list[dict[str, Any]]:
    """A row for each number of blocks, of paths (T, D); distances in parts of that between episodes."""
    long = [z_TD for z_TD in walked if len(z_TD) > 1]
    if len(long) < 2:
        raise DataError(f"Distances are compared with those of other episodes; {len(long)} have two frames. Give more.")
    spread = [z_TD[np.linspace(0, len(z_TD) - 1, _FRAMES).astype(int)] for z_TD in long]
    far = between_episodes(np.stack(spread))
    if far <= 0:
        raise DataError(ALL_SAME)
    rows: list[dict[str, Any]] = []
    for blocks in BLOCKS:
        parts = [np.square(z_TD[blocks:] - z_TD[:-blocks]).sum(-1) for z_TD in long if len(z_TD) > blocks]
        distances = np.concatenate([*parts, np.zeros(0)]) / far
        if rows and len(distances) < FEWEST_PAIRS:
            break
        if len(distances):
            low, high = np.quantile(distances, (0.25, 0.75))
            row = {"mean": distances.mean(), "low": low, "high": high, "farther": (distances > 1).mean()}
            counts = {"blocks": blocks, "pairs": len(distances)}
            rows.append(counts | {name: float(value) for name, value in row.items()})
    return rows


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Find, or read what was found before; written into ``out``."""
    del seed, quick  # nothing is drawn, and it is quick
    found = read_findings(out, VERB, question(VERB, subject, store, {}))
    if found is None:
        found = landscape(subject, store, on_progress)
        write_findings(out, found, draw)
    return found


@styled
def draw(findings: Findings) -> Figure:
    """The mean distance over blocks apart, with the middle half of pairs."""
    figure, ((axes,),) = canvas(1, 1, 5.2, 3.2)
    rows = findings.numbers["rows"]
    blocks, means, low, high = ([row[name] for row in rows] for name in ("blocks", "mean", "low", "high"))
    axes.fill_between(blocks, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="middle half of pairs")
    axes.plot(blocks, means, "o-", color=COLOURS[0], markersize=3, label="mean")
    axes.axhline(1, color=INK, linewidth=1, linestyle="dashed", label="frames of different episodes")
    axes.set(
        xticks=blocks, xlabel="action blocks between two frames", ylabel="squared distance, relative", ylim=(0, None)
    )
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.legend()
    return figure
