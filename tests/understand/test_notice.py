"""What is noticed: whatever the eyes see, no more; every world's changes change what they name, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from seers import blind, place, seer

from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.data.generate import generate_episode
from lewm.data.store import EpisodeStore
from lewm.envs.registry import env_entry, make_env
from lewm.errors import DataError
from lewm.understand import notice as verb
from lewm.understand.notice import changes_of, investigate, notice


@pytest.fixture
def store(debug_config: Config) -> Iterator[EpisodeStore]:
    assert debug_config.data is not None
    with EpisodeStore(debug_config.data) as store:
        yield store


def test_an_encoder_of_places_notices_in_proportion(debug_run: Path, store: EpisodeStore) -> None:
    near, far = notice(seer(debug_run, "place", place), store).numbers["rows"]
    assert (near["amount"], far["amount"]) == (5, 20)
    assert far["median"] / near["median"] == pytest.approx(16, rel=0.25), "squared distances, four times as far"
    assert far["hardly"] < near["hardly"]


def test_one_that_is_blind_is_refused(debug_run: Path, store: EpisodeStore) -> None:
    with pytest.raises(DataError, match="collapsed"):
        notice(seer(debug_run, "blind", blind), store)


def test_it_is_written_and_found_again(
    debug_run: Path, store: EpisodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = seer(debug_run, "place", place)
    found = investigate(subject, store, tmp_path, 0, True, None)
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
    monkeypatch.setattr(verb, "notice", None)
    assert investigate(subject, store, tmp_path, 0, True, None) == found


def test_one_episode_says_what_is_missing(debug_run: Path, tmp_path: Path) -> None:
    collect("tworoom", tmp_path / "one.h5", CollectConfig(episodes=1, resolution=28, workers=1), 3)
    with EpisodeStore(tmp_path / "one.h5") as store, pytest.raises(DataError, match="two episodes"):
        notice(seer(debug_run, "place", place), store)


@pytest.mark.parametrize(
    ("world", "changed"),
    [
        ("tworoom", [{0, 1}]),
        ("pusht", [{0, 1}, {2, 3}, {4}]),
        ("reacher", [{0}, {1}]),
        ("cube", [{14, 15}, {17, 18, 19, 20}, set(range(6, 14))]),
    ],
)
def test_changes_change_what_they_name(world: str, changed: list[set[int]]) -> None:
    if env_entry(world).extra:
        pytest.importorskip("ogbench")
    with contextlib.closing(make_env(world, 28)) as env:
        states = generate_episode(world, 28, 5, 0, draw=False, env=env)["state"][::5]
        for change, numbers in zip(changes_of(world, env, states), changed, strict=True):
            for amount in change.amounts:
                moved = change.do(states, amount)
                assert set(np.flatnonzero((moved != states).any(0))) <= numbers
                inside = np.clip(moved, env.state_space.low, env.state_space.high)
                assert (env.render_states(inside[:3]) != env.render_states(states[:3])).any(), change.thing


def test_turning_a_cube_keeps_a_quaternion_and_turns_it() -> None:
    states = np.zeros((1, 47))
    states[0, 17] = 1
    quarter = verb._yawed(states, 90)[0, 17:21]
    np.testing.assert_allclose(quarter, [np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
    np.testing.assert_allclose(verb._yawed(verb._yawed(states, 30), -30), states, atol=1e-12)


def test_a_world_of_ones_own_is_changed_number_by_number() -> None:
    class World:
        state_names = ("x", "still")

    states = np.stack([np.arange(5.0), np.ones(5)], axis=1)
    (change,) = changes_of("mine", World(), states)  # type: ignore[arg-type]
    assert (change.thing, change.amounts) == ("x", (0.2, 1.0))
    moved = change.do(states, 1.0)
    np.testing.assert_allclose(np.abs(moved - states)[:, 0], states[:, 0].std())
