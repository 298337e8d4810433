"""What a probe is to read from embeddings: the typed quantities of a dataset's states, as numbers to regress on.

An angle has a seam where its number jumps although nothing does. So it is asked for twice: as sine and cosine, and as
the paper has it, as a number with its seam. A quaternion and its negative are the same orientation: it is asked for
with its first number positive, and as a rotation matrix, which has no sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.envs.quantities import Quantity, plain_quantities
from lewm.envs.registry import EnvEntry, env_type
from lewm.errors import DataError, unknown_name
from lewm.types import Array
from lewm.understand.states import STATE, recorded_states

# Predictions and truth, (n, k) each, in their own units -> one number that people can imagine, how far off they are.
TypicalError = Callable[[Array, Array], float]


@dataclass(frozen=True)
class Target:
    """Numbers that a probe learns to read. quantity: its name.  form: how it is put into numbers, or "".

    values: float64 (F, k), of every frame of a dataset.  unit: of ``error``.  as_published: it is the paper's form.
    """

    quantity: str
    form: str
    values: Array
    unit: str
    error: TypicalError
    as_published: bool = True

    @property
    def name(self) -> str:
        return f"{self.quantity} ({self.form})" if self.form else self.quantity


@dataclass(frozen=True)
class Truth:
    """What is known of a dataset's frames. targets: in the order of the world's quantities.

    visible: of which frames show all that matters, bool (F,).
    """

    targets: tuple[Target, ...]
    visible: Array


def read_truth(store: EpisodeStore, world: EnvEntry | None, names: Sequence[str] = ()) -> Truth:
    """The targets of a dataset's frames. names: of the quantities that are asked for; empty: all of them."""
    states, quantities, state_names, visible = _read_states(store, world)
    known = {quantity.name: quantity for quantity in quantities}
    for name in names:
        if name not in known:
            raise DataError(unknown_name(f"property of {store.path}", name, known))
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    return Truth(tuple(target for each in chosen for target in targets_of(each, state_names, states)), visible)


def _read_states(
    store: EpisodeStore, world: EnvEntry | None
) -> tuple[Array, tuple[Quantity, ...], tuple[str, ...], Array]:
    """States float64 (F, S) of the frames, what they are, the names of their numbers, and what is visible, (F,)."""
    if world is None:
        states = recorded_states(store, rows=store.frame_rows)
        names = tuple(f"{STATE} {number}" for number in range(states.shape[1]))
        return states, plain_quantities(names), names, np.ones(len(states), bool)
    env = env_type(world.name)
    states = recorded_states(store, env.state_names, store.frame_rows)
    return states, env.probed(), env.state_names, env.visible(states)


def targets_of(quantity: Quantity, state_names: Sequence[str], states: Array) -> Iterator[Target]:
    """The forms in which a quantity of states (F, S) is asked for."""
    values = states[:, quantity.places(state_names)]
    if quantity.kind == "quaternion":
        yield Target(quantity.name, "first number positive", _positive(values), "°", _turn_between)
        yield Target(quantity.name, "rotation matrix", _matrix(values), "°", _turn_between_matrices, as_published=False)
    elif quantity.kind in ("angle", "yaw"):
        angles = _yaw(values) if quantity.kind == "yaw" else values
        yield from _angles(quantity, angles)
    elif quantity.kind == "opening":
        yield Target(quantity.name, "", values, "% taken for the other", _confused)
    else:
        yield Target(quantity.name, "", values, quantity.unit, _distance)


def _angles(quantity: Quantity, angles: Array) -> Iterator[Target]:
    """Angles (F, k) as sine and cosine, and as numbers that jump at the seam."""
    period, seam = quantity.period, quantity.seam
    turns = angles * (2 * math.pi / period)
    to_degrees = period / (2 * math.pi) * 180 / math.pi

    def error_of_circle(predicted: Array, truth: Array) -> float:
        return _typical(_wrapped(_direction(predicted) - _direction(truth)) * to_degrees)

    def error_of_number(predicted: Array, truth: Array) -> float:
        return _typical(_wrapped((predicted - truth) * (2 * math.pi / period)) * to_degrees)

    circle = np.concatenate([np.sin(turns), np.cos(turns)], axis=1)
    yield Target(quantity.name, "sine and cosine", circle, "°", error_of_circle, as_published=False)
    raw = (angles - seam) % period + seam
    yield Target(quantity.name, f"raw, seam at {seam * 180 / math.pi:g}°", raw, "°", error_of_number)


def _direction(circle: Array) -> Array:
    """Sines and cosines (n, 2k) -> angles (n, k)."""
    sine, cosine = np.split(circle, 2, axis=1)
    return np.arctan2(sine, cosine)


def _wrapped(angles: Array) -> Array:
    return (angles + math.pi) % (2 * math.pi) - math.pi


def _typical(differences: Array) -> float:
    """The median size of differences (n, k)."""
    return float(np.median(np.abs(differences)))


def _distance(predicted: Array, truth: Array) -> float:
    """The median distance."""
    return float(np.median(np.linalg.norm(predicted - truth, axis=1)))


def _confused(predicted: Array, truth: Array) -> float:
    """In percent, how often more than half is taken for less, or less for more."""
    return float(100 * np.mean((predicted > 0.5) != (truth > 0.5)))


def _unit(quaternions: Array) -> Array:
    return quaternions / np.maximum(np.linalg.norm(quaternions, axis=1, keepdims=True), 1e-12)


def _positive(quaternions: Array) -> Array:
    """Of each quaternion (F, 4) and its negative, the one whose first number that is not zero is positive."""
    units = _unit(quaternions)
    first = np.take_along_axis(units, np.argmax(np.abs(units) > 1e-9, axis=1)[:, None], axis=1)
    return units * np.where(first < 0, -1.0, 1.0)


def _matrix(quaternions: Array) -> Array:
    """Quaternions (F, 4) -> the rotation matrices, (F, 9)."""
    w, x, y, z = _unit(quaternions).T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([number for row in rows for number in row], axis=1)


def _yaw(quaternions: Array) -> Array:
    """Quaternions (F, 4) -> the turn about z, (F, 1)."""
    matrix = _matrix(quaternions)
    return np.arctan2(matrix[:, 3], matrix[:, 0])[:, None]


def _turn_between(predicted: Array, truth: Array) -> float:
    """The median angle of the turn from one orientation to the other, in degrees."""
    alike = np.abs((_unit(predicted) * _unit(truth)).sum(axis=1))
    return float(np.median(2 * np.degrees(np.arccos(np.clip(alike, 0, 1)))))


def _turn_between_matrices(predicted: Array, truth: Array) -> float:
    """The same of rotation matrices (n, 9); what a probe predicts is turned into the nearest one first."""
    left, _, right = np.linalg.svd(predicted.reshape(-1, 3, 3))
    signs = np.ones((len(left), 3))
    signs[:, 2] = np.linalg.det(left @ right)
    nearest = (left * signs[:, None]) @ right
    trace = (nearest * truth.reshape(-1, 3, 3)).sum(axis=(1, 2))
    return float(np.median(np.degrees(np.arccos(np.clip((trace - 1) / 2, -1, 1)))))
