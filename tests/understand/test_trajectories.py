"""Matched trajectories: equal bit by bit until one thing is changed, and changed as the table says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ruler import episodes

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.store import EpisodeStore
from lewm.envs.registry import env_entry, env_type, make_env
from lewm.errors import ConfigError, DataError
from lewm.understand import trajectories
from lewm.understand.states import recorded_states
from lewm.understand.trajectories import (
    CHANGES,
    UNDISTURBED,
    Change,
    Excerpt,
    Matched,
    changes_of,
    episodes_long_enough,
    matched,
)

EXCERPT = Excerpt(frame_skip=5, blocks=4, changed=2)
STEP = EXCERPT.frame_skip * EXCERPT.changed
every_world = pytest.mark.parametrize("world", ["tworoom", "pusht", "reacher", "cube"])
_lived: dict[str, Matched] = {}


def lived(world: str, folder: Path) -> Matched:
    """One episode of a world with all its changes."""
    if world not in _lived:
        if world in ("reacher", "cube"):
            pytest.importorskip("mujoco")
        collect(world, folder / f"{world}.h5", CollectConfig(1, resolution=28, workers=1))
        with EpisodeStore(folder / f"{world}.h5") as store, trajectories.simulator(env_entry(world), 28) as env:
            states = recorded_states(store, env.state_names)
            found, again = (matched(env, store, states, 0, EXCERPT, CHANGES[world], seed=0) for _ in range(2))
        assert found is not None
        assert again is not None
        assert all(np.array_equal(found.frames[name], again.frames[name]) for name in found.frames)
        _lived[world] = found
    return _lived[world]


@every_world
def test_trajectories_are_equal_until_the_change_and_differ_at_it(world: str, tmp_path: Path) -> None:
    found = lived(world, tmp_path)
    plain = found.frames[UNDISTURBED]
    assert plain.shape == (EXCERPT.blocks + 1, 28, 28, 3)
    for change in CHANGES[world]:
        frames, states = found.frames[change.name], found.states[change.name]
        np.testing.assert_array_equal(frames[: EXCERPT.changed], plain[: EXCERPT.changed])
        np.testing.assert_array_equal(states[:STEP], found.states[UNDISTURBED][:STEP])
        if change.kind == "colour":
            np.testing.assert_array_equal(states, found.states[UNDISTURBED])
        if change.kind != "near":  # at 28 px a small step may not show
            assert (frames[EXCERPT.changed] != plain[EXCERPT.changed]).any()


@every_world
def test_objects_are_moved_by_what_the_table_says_and_nothing_else_is(world: str, tmp_path: Path) -> None:
    found, names = lived(world, tmp_path), env_type(world).state_names
    plain = found.states[UNDISTURBED][STEP]
    for change in CHANGES[world]:
        if change.kind == "colour":
            continue
        moved = found.states[change.name][STEP]
        places = [names.index(name) for name in change.place]
        assert np.linalg.norm(moved[places] - plain[places]) == pytest.approx(change.distance, rel=1e-6)
        others = np.setdiff1d(np.arange(len(plain)), places)
        np.testing.assert_allclose(moved[others], plain[others], atol=1e-9)
        assert change.fits(moved)


def test_replayed_actions_lead_to_the_recorded_states(tmp_path: Path) -> None:
    path = episodes(tmp_path / "data.h5", 4)
    with EpisodeStore(path) as store, trajectories.simulator(env_entry("tworoom"), 28) as env:
        states, first = recorded_states(store, env.state_names), int(store.offsets[store.lengths.argmax()]) + 3
        again, frames = trajectories.replay(env, states[first], store.actions[first : first + 20], 5)
        np.testing.assert_array_equal(again, states[first : first + 21])
        np.testing.assert_array_equal(frames, store.read_frames(np.arange(first, first + 21, 5)))


def test_an_episode_without_room_is_none_and_a_short_one_is_passed_over(tmp_path: Path) -> None:
    path = episodes(tmp_path / "data.h5", 3)
    nowhere = Change("far", "agent", None, 500.0, "px", ("agent_x", "agent_y"), 2, trajectories._in_a_room)
    with EpisodeStore(path) as store, trajectories.simulator(env_entry("tworoom"), 28) as env:
        states = recorded_states(store, env.state_names)
        assert matched(env, store, states, 0, EXCERPT, [nowhere], 0) is None
        longest = int(store.lengths.max())
        assert episodes_long_enough(store, Excerpt(1, longest, 1)) == []
        assert episodes_long_enough(store, Excerpt(1, longest - 1, 1)) == [int(store.lengths.argmax())]


def test_states_that_no_simulator_can_take_are_refused(tmp_path: Path) -> None:
    path = episodes(tmp_path / "data.h5", 1)
    with (
        EpisodeStore(path) as store,
        make_env("pusht", 28) as env,
        pytest.raises(DataError, match="of 2 numbers, but those of its world have 7"),
    ):
        recorded_states(store, env.state_names)


def test_worlds_without_objects_are_refused_and_others_change_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = env_entry("tworoom")
    monkeypatch.delitem(CHANGES, "tworoom")
    assert [change.kind for change in changes_of(entry)] == ["colour"]
    trajectories.register_changes("tworoom", [Change("colour", "ghost", (1, 2, 3))])
    with pytest.raises(ConfigError, match="no object 'ghost', only agent"):
        changes_of(entry)
    monkeypatch.setattr(env_type("tworoom"), "objects", ())
    with pytest.raises(ConfigError, match="tworoom has no objects"):
        changes_of(entry)
