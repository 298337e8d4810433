"""How far distances reach: a walk that goes on has no end in sight, one that circles soon does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from seers import place, seer

from lewm.config import Config
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.types import Array
from lewm.understand.landscape import by_blocks, draw, landscape
from lewm.understand.looking import between_episodes


def walks(kind: str) -> list[Array]:
    """Paths (T, 2) of 64 walkers: straight on, each in its direction, or anywhere at any time."""
    rng, time = np.random.default_rng(0), np.arange(30.0)
    angles = rng.uniform(0, 2 * np.pi, 64)
    if kind == "straight":
        return [np.outer(time, (np.cos(angle), np.sin(angle))) for angle in angles]
    return [rng.normal(size=(30, 2)) for _ in angles]


def test_straight_walks_are_as_far_as_they_went() -> None:
    rows = by_blocks(walks("straight"))
    means = [row["mean"] for row in rows]
    blocks = np.array([row["blocks"] for row in rows])
    np.testing.assert_allclose(means, means[0] * blocks**2)


def test_noise_is_far_at_once() -> None:
    rows = by_blocks(walks("noise"))
    assert all(0.7 < row["mean"] < 1.3 for row in rows)
    assert all(0 <= row["farther"] <= 1 and row["low"] <= row["high"] for row in rows)


def test_what_is_far_is_the_mean_over_pairs_of_frames_of_two_episodes() -> None:
    z = np.random.default_rng(1).normal(size=(3, 4, 5))
    pairs = [np.square(a - b).sum() for i in range(3) for j in range(3) if i != j for a in z[i] for b in z[j]]
    assert between_episodes(z) == pytest.approx(np.mean(pairs))


def test_too_little_is_refused() -> None:
    with pytest.raises(DataError, match="Give more"):
        by_blocks(walks("straight")[:1])
    with pytest.raises(DataError, match="collapsed"):
        by_blocks([np.zeros((5, 2))] * 3)


def test_of_a_model_and_its_episodes(debug_run: Path, debug_config: Config, tmp_path: Path) -> None:
    assert debug_config.data is not None
    data = tmp_path / "data.h5"
    data.write_bytes(debug_config.data.read_bytes())
    with EpisodeStore(data) as store:
        found = landscape(seer(debug_run, "place", place), store)
    (table,) = found.tables
    assert table.rows[0][0] == "1"
    assert found.numbers["rows"][0]["mean"] < found.numbers["rows"][-1]["mean"]
    draw(found)
