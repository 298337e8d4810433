"""`lewm understand notice`: what of its world a model sees: how far its embedding moves when one thing changes.

Recorded states are drawn again with one thing moved, turned, opened or closed, and nothing else. The squared distance
between both embeddings is given in parts of the mean one between frames of different episodes. What is hardly noticed
cannot be planned with, however well the model predicts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.envs.base import WorldEnv
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, DataError
from lewm.evaluate.comparison_tables import Table
from lewm.types import Array, ProgressCallback
from lewm.understand.figures import COLOURS, FAINT, INK, canvas, styled
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.looking import ALL_SAME, between_episodes, frame_rows, look, remarks_on
from lewm.understand.states import recorded_states
from lewm.understand.subject import Subject, question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "notice"
COST = "a few thousand frames drawn and embedded"
HARDLY = 0.01  # of the distance between episodes
EPISODES, FRAMES = 16, 8

# States (N, S) and how much -> states with one thing changed.
_Do = Callable[[Array, float], Array]


@dataclass(frozen=True)
class Change:
    """What is done to one thing. amounts: small and large, in ``unit``."""

    thing: str
    do: _Do
    amounts: tuple[float, ...]
    unit: str


def fits(subject: Subject) -> str | None:
    """Why it cannot be asked; None: it can."""
    return None if subject.world is not None else "nobody knows which world to draw states of"


def notice(
    subject: Subject, store: EpisodeStore, quick: bool = False, on_progress: ProgressCallback | None = None
) -> Findings:
    """How far embeddings move. quick: a quarter of the frames."""
    if subject.world is None:
        raise ConfigError(f"{subject.source} does not say which world it was trained in, so no states can be drawn.")
    with contextlib.closing(make_env(subject.world.name, subject.model.image_size, "state")) as env:
        part = 2 if quick else 1
        states = recorded_states(store, env.state_names)
        states_EFS = _spread(states, frame_rows(subject, store), EPISODES // part, FRAMES // part)
        flat_NS = states_EFS.reshape(-1, states_EFS.shape[-1])
        changes = changes_of(subject.world.name, env, flat_NS)
        asked = [(change, amount) for change in changes for amount in change.amounts]
        total, done = (len(asked) + 1) * len(flat_NS), 0

        def drawn(states_NS: Array) -> Array:
            nonlocal done
            inside = np.clip(states_NS, env.state_space.low, env.state_space.high)
            z = look(subject, env.render_states(inside))
            done += len(z)
            if on_progress:
                on_progress(done, total)
            return z

        z_ND = drawn(flat_NS)
        far = between_episodes(z_ND.reshape(*states_EFS.shape[:2], -1))
        if far <= 0:
            raise DataError(ALL_SAME)
        rows = []
        for change, amount in asked:
            moved = np.square(drawn(change.do(flat_NS, amount)) - z_ND).sum(-1) / far
            low, middle, high = np.quantile(moved, (0.1, 0.5, 0.9))
            numbers = {"low": low, "median": middle, "high": high, "hardly": (moved < HARDLY).mean()}
            said = {"thing": change.thing, "amount": amount, "unit": change.unit}
            rows.append(said | {name: float(value) for name, value in numbers.items()})
    return _findings(subject, question(VERB, subject, store, {"quick": quick}), rows, len(flat_NS))


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Find, or read what was found before; written into ``out``."""
    del seed  # nothing is drawn by lot
    found = read_findings(out, VERB, question(VERB, subject, store, {"quick": quick}))
    if found is None:
        found = notice(subject, store, quick, on_progress)
        write_findings(out, found, draw)
    return found


def _spread(states: Array, rows_of_episodes: list[Array], episodes: int, frames: int) -> Array:
    """States (E, F, S) of frames, evenly from some of the episodes and from end to end of each."""
    rows = [each for each in rows_of_episodes if len(each)]
    chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, min(episodes, len(rows))).astype(int)]
    return np.stack([states[each[np.linspace(0, len(each) - 1, frames).astype(int)]] for each in chosen])


# -- what can be changed -------------------------------------------------------------------------------------------


def changes_of(world: str, env: WorldEnv, states_NS: Array) -> tuple[Change, ...]:
    """A world's things; of a user's own each number of the state, by parts of how much it varies."""
    if world in _CHANGES:
        return _CHANGES[world]
    spread = states_NS.std(0)
    return tuple(
        Change(name, _scaled(_towards_the_middle(slice(i, i + 1)), spread[i]), (0.2, 1.0), "standard deviations")
        for i, name in enumerate(env.state_names)
        if spread[i] > 0
    )


def _towards_the_middle(place: slice) -> _Do:
    """Nearer to the mean of all states, or beyond it, so that it stays in the picture."""

    def do(states_NS: Array, distance: float) -> Array:
        position = states_NS[:, place]
        way = position.mean(0) - position
        way[~way.any(-1)] = 1.0  # whatever is there already goes anywhere
        length = np.linalg.norm(way, axis=-1, keepdims=True)
        changed = states_NS.copy()
        changed[:, place] += distance * way / length
        return changed

    return do


def _scaled(do: _Do, unit: float) -> _Do:
    return lambda states_NS, amount: do(states_NS, amount * unit)


def _added(number: int) -> _Do:
    """An angle, turned."""

    def do(states_NS: Array, degrees: float) -> Array:
        changed = states_NS.copy()
        changed[:, number] += math.radians(degrees)
        return changed

    return do


def _wrapped(number: int) -> _Do:
    """An angle, turned, and brought to [0, 2π)."""

    def do(states_NS: Array, degrees: float) -> Array:
        changed = _added(number)(states_NS, degrees)
        changed[:, number] %= 2 * math.pi
        return changed

    return do


def _yawed(states_NS: Array, degrees: float) -> Array:
    """Cube's cube, turned about the vertical: its quaternion times that of the turn, from the left."""
    half = math.radians(degrees) / 2
    w, x, y, z = states_NS[:, 17:21].T
    cosine, sine = math.cos(half), math.sin(half)
    changed = states_NS.copy()
    turned = (cosine * w - sine * z, cosine * x - sine * y, cosine * y + sine * x, cosine * z + sine * w)
    changed[:, 17:21] = np.stack(turned, axis=-1)
    return changed


def _flipped_gripper(states_NS: Array, share: float) -> Array:
    """Cube's gripper, brought so far on the way from how it is to the other extreme of these states."""
    joints, closed = slice(6, 14), states_NS[:, 45]
    shut, wide = states_NS[closed.argmax(), joints], states_NS[closed.argmin(), joints]
    other = np.where((closed > (closed.max() + closed.min()) / 2)[:, None], wide, shut)
    changed = states_NS.copy()
    changed[:, joints] += share * (other - changed[:, joints])
    return changed


_CHANGES = {
    "tworoom": (Change("agent moved", _towards_the_middle(slice(0, 2)), (5.0, 20.0), "px of 224"),),
    "pusht": (
        Change("agent moved", _towards_the_middle(slice(0, 2)), (10.0, 40.0), "px of 512"),
        Change("block moved", _towards_the_middle(slice(2, 4)), (10.0, 40.0), "px of 512"),
        Change("block turned", _wrapped(4), (5.0, 45.0), "degrees"),
    ),
    "reacher": (
        Change("shoulder turned", _added(0), (5.0, 45.0), "degrees"),
        Change("wrist turned", _towards_the_middle(slice(1, 2)), (0.1, 0.8), "rad"),
    ),
    "cube": (
        Change("cube moved", _towards_the_middle(slice(14, 16)), (0.02, 0.10), "m"),
        Change("cube turned", _yawed, (15.0, 45.0), "degrees"),
        Change("gripper opened or closed", _flipped_gripper, (1.0,), "of the way"),
    ),
}

# -- what people see -----------------------------------------------------------------------------------------------


_UNSEEN = "0 is what every model has for a thing that no single frame shows, as a velocity: it speaks against none."


def _findings(subject: Subject, asked: dict[str, Any], rows: list[dict[str, Any]], frames: int) -> Findings:
    header = ("what changes", "by", "median distance", "middle 80 %", f"frames below {HARDLY}")
    cells = tuple(
        (
            row["thing"],
            f"{row['amount']:g} {row['unit']}",
            f"{row['median']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            f"{row['hardly']:.0%}",
        )
        for row in rows
    )
    sentences = (
        "1 is the mean squared distance between frames of different episodes.",
        f"Each row rests on {frames} frames, drawn twice: as recorded, and with one thing changed.",
        *([_UNSEEN] if any(row["high"] == 0 for row in rows) else []),
        *remarks_on(subject),
    )
    table = Table("How far the embedding moves", header, cells)
    numbers = {"rows": rows, "frames": frames, "model": subject.name}
    return Findings(VERB, "What the model notices", asked, (table,), sentences, numbers, {})


@styled
def draw(findings: Findings) -> Figure:
    """Medians with the middle 80 % of frames, on a logarithmic scale."""
    rows = findings.numbers["rows"][::-1]
    figure, ((axes,),) = canvas(1, 1, 5.6, 1.2 + 0.32 * len(rows))
    places, least = range(len(rows)), 1e-5
    low, median, high = (np.maximum([row[name] for row in rows], least) for name in ("low", "median", "high"))
    axes.hlines(places, low, high, color=COLOURS[0], linewidth=3, alpha=0.35)
    axes.plot(median, places, "o", color=COLOURS[0], markersize=5)
    axes.axvline(1, color=INK, linewidth=1, linestyle="dashed", label="other episodes")
    axes.axvline(HARDLY, color=COLOURS[5], linewidth=1, linestyle="dotted", label="hardly noticed")
    axes.set_xscale("log")
    axes.set_yticks(places, [f"{row['thing']}, {row['amount']:g} {row['unit']}" for row in rows])
    axes.set(xlabel="squared distance of embeddings, relative", ylim=(-0.6, len(rows) - 0.4))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    figure.legend(loc="outside upper right", ncols=2)
    return figure
