"""Held-out episodes: of the model's world and kind, extended when more are asked for, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError
from lewm.evaluate.manifest import TUNING_EPISODE
from lewm.types import Demonstration
from lewm.understand.episodes import EPISODES_PER_SEED, another_kind, held_out_episodes
from lewm.understand.subject import Subject, embeddings, open_episodes, open_subject


@pytest.fixture(scope="module")
def subject(debug_run: Path) -> Subject:
    return open_subject(debug_run, "cpu")


def states_of(path: Path, episodes: int) -> np.ndarray:
    with EpisodeStore(path) as store:
        return store.read_column("state")[: store.offsets[episodes - 1] + store.lengths[episodes - 1]]


def test_episodes_fit_the_model_and_are_the_held_out_ones(subject: Subject, tmp_path: Path) -> None:
    path = held_out_episodes(subject, tmp_path / "episodes.h5", 2)
    with open_episodes(path, subject) as store:
        assert store.num_episodes == 2
        assert store.frame_stride == subject.model.frame_skip
        assert another_kind(subject, store) is None
        first = store.read_column("state")[: store.lengths[0]]
    expected = generate_episode("tworoom", 28, HELD_OUT_SEED, EPISODES_PER_SEED, draw=False)["state"]
    np.testing.assert_array_equal(first, expected)
    assert 100 * TUNING_EPISODE <= EPISODES_PER_SEED  # pairs are cut from episodes before these


def test_more_episodes_extend_the_file_and_fewer_change_nothing(subject: Subject, tmp_path: Path) -> None:
    path = held_out_episodes(subject, tmp_path / "episodes.h5", 2)
    earlier = states_of(path, 2)
    held_out_episodes(subject, path, 4)
    np.testing.assert_array_equal(states_of(path, 2), earlier)
    content = path.read_bytes()
    held_out_episodes(subject, path, 3)
    assert path.read_bytes() == content


def test_an_extended_file_is_embedded_anew(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "episodes.h5"
    for episodes in (2, 3):
        held_out_episodes(subject, path, episodes)
        with open_episodes(path, subject) as store, embeddings(subject, store) as features:
            assert features.gather(store.frame_rows[-1:, None]).shape[0] == 1


def test_replays_say_of_which_demonstration() -> None:
    lengths = [number + 2 for number in range(21)]  # by which a replay is known
    demonstrations = [Demonstration(np.full((n, 5), 200.0), np.full((n, 2), 200.0)) for n in lengths]
    replays = [generate_episode("pusht", 28, HELD_OUT_SEED, i, 1, demonstrations, draw=False) for i in range(4)]
    for replay in replays:
        assert set(replay["demonstration"]) == {len(replay["state"]) - 3}
        assert replay["demonstration"][0] % 10 == 0
    assert "demonstration" not in generate_episode("pusht", 28, 0, 0, 1, demonstrations, draw=False), "as ever"


def test_another_seed_has_other_episodes_and_its_own_file(subject: Subject, tmp_path: Path) -> None:
    path = held_out_episodes(subject, tmp_path / "episodes.h5", 1)
    with pytest.raises(DataError, match="first_episode"):
        held_out_episodes(subject, path, 1, seed=1)
    other = held_out_episodes(subject, tmp_path / "other.h5", 1, seed=1)
    assert not np.array_equal(states_of(path, 1)[0], states_of(other, 1)[0])


def test_training_data_still_cannot_have_the_held_out_seed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held out"):
        collect("tworoom", tmp_path / "data.h5", CollectConfig(1, resolution=8), HELD_OUT_SEED)


def test_episodes_of_another_kind_are_named(subject: Subject, tmp_path: Path) -> None:
    collect("tworoom", tmp_path / "wild.h5", CollectConfig(1, resolution=28, exploration=0.5, workers=1))
    with open_episodes(tmp_path / "wild.h5", subject) as store:
        sentence = another_kind(subject, store)
    assert sentence is not None
    assert "exploration 0.5 and not 0" in sentence


def test_none_can_be_collected_for_a_model_of_no_world(subject: Subject, tmp_path: Path) -> None:
    homeless = Subject(subject.source, subject.model, subject.digest, subject.encoder, None)
    with pytest.raises(ConfigError, match="--data"):
        held_out_episodes(homeless, tmp_path / "episodes.h5", 1)
    with pytest.raises(ConfigError, match="seed"):  # its episodes are those of evaluation
        held_out_episodes(subject, tmp_path / "episodes.h5", 1, seed=-1)
    with pytest.raises(ConfigError, match="episodes"):
        held_out_episodes(subject, tmp_path / "episodes.h5", 0)
