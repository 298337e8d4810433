"""What the agent senses of itself: which numbers of a file these are, and what is said where nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.proprio import WITHOUT_NAMES, describe_proprio, read_proprio
from lewm.data.store import EpisodeStore, write_episodes
from lewm.envs.registry import env_entry, env_type
from lewm.errors import DataError

WORLDS = {
    "tworoom": "agent_x, agent_y",
    "pusht": "agent_x, agent_y",
    "reacher": "shoulder, wrist, shoulder_velocity, wrist_velocity",
    "cube": "33 numbers: shoulder_pan, ",
}


@contextmanager
def store_of(path: Path, proprio: np.ndarray | None, **attributes: str) -> Iterator[EpisodeStore]:
    """A file of one episode with such a column."""
    columns: dict[str, Any] = {} if proprio is None else {"proprio": proprio}
    length = 6 if proprio is None else len(proprio)
    frames, action = np.zeros((length, 4, 4, 3), np.uint8), np.zeros((length, 2), np.float32)
    write_episodes(path, [{"pixels": frames, "action": action, **columns}], attributes)
    with EpisodeStore(path) as store:
        yield store


@pytest.mark.parametrize("name", WORLDS)
def test_an_older_file_of_a_known_world_gives_the_agents_part_of_its_state(tmp_path: Path, name: str) -> None:
    if name in ("reacher", "cube"):
        pytest.importorskip("ogbench")
    world = env_type(name)
    assert set(WITHOUT_NAMES) == {env_entry(known).gym_id for known in WORLDS}
    state = np.random.default_rng(0).normal(size=(6, len(world.state_names))).astype(np.float32)
    with store_of(tmp_path / "old.h5", state, environment=env_entry(name).gym_id) as store:
        np.testing.assert_array_equal(read_proprio(store), world.proprio(state))
        sensed = len(world.proprio_names)
        assert describe_proprio(store).startswith(f"{sensed} of its {len(world.state_names)} numbers: an older file")


def test_a_file_of_ours_that_does_not_say_what_it_has_is_refused(tmp_path: Path) -> None:
    for environment, size in (("mine/Puck-v0", 4), ("lewm/PushT-v0", 5)):
        with store_of(tmp_path / "old.h5", np.zeros((6, size)), environment=environment) as store:
            with pytest.raises(
                DataError, match=rf"old\.h5 has {size} numbers of 'proprio', perhaps the state .* Collect"
            ):
                read_proprio(store)
            assert "methods refuse" in describe_proprio(store)


def test_files_of_others_mean_what_they_say(tmp_path: Path) -> None:
    column = np.arange(18.0).reshape(6, 3)
    with store_of(tmp_path / "theirs.h5", column) as store:
        assert read_proprio(store).dtype == np.float32
        np.testing.assert_array_equal(read_proprio(store), column)
        assert describe_proprio(store) == "3 numbers, as the makers of the file define them"
    with store_of(tmp_path / "without.h5", None) as store:
        assert describe_proprio(store) == "none"


@pytest.mark.parametrize("name", ["tworoom", "pusht"])
def test_a_collected_file_says_what_it_has(tmp_path: Path, name: str) -> None:
    collect(name, tmp_path / "new.h5", CollectConfig(episodes=1, resolution=28, workers=1))
    with EpisodeStore(tmp_path / "new.h5") as store:
        assert store.attributes["proprio"] == WORLDS[name]
        assert describe_proprio(store) == f"2 numbers: {WORLDS[name]}"
        np.testing.assert_array_equal(read_proprio(store), store.read_column("state")[:, :2].astype(np.float32))


def test_an_older_file_is_extended_only_where_its_column_means_the_same(tmp_path: Path) -> None:
    """In TwoRoom the agent is all that there is."""
    for name, state in (
        ("tworoom", None),
        ("pusht", "agent_x, agent_y, block_x, .* there, but 'agent_x, agent_y' was"),
    ):
        path, whole = tmp_path / f"{name}.h5", tmp_path / f"{name}-whole.h5"
        collect(name, path, CollectConfig(episodes=1, resolution=28, workers=1))
        with h5py.File(path, "r+") as file:
            del file.attrs["proprio"], file.attrs["checksums"]
        before = path.read_bytes()
        more = CollectConfig(episodes=2, resolution=28, workers=1)
        if state is None:
            collect(name, path, more)
            collect(name, whole, more)
            with EpisodeStore(path) as one, EpisodeStore(whole) as other:
                assert one.digest == other.digest
                assert one.attributes == other.attributes
        else:
            with pytest.raises(DataError, match=f"proprio is '{state}"):
                collect(name, path, more)
            assert path.read_bytes() == before
