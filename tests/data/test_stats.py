"""Action statistics against the plain definition, and where that has none; the background of frames."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lewm.data import stats as stats_module
from lewm.data.stats import (
    BACKGROUND_FRAMES,
    RECORDED_SEQUENCES,
    RECORDED_STEPS,
    action_stats,
    background,
    recorded_actions,
)
from lewm.data.store import EpisodeStore
from lewm.errors import DataError


def test_statistics_ignore_the_rows_without_an_action() -> None:
    actions = np.array([[1, 10], [np.nan, np.nan], [3, 30], [5, 20]], np.float32)
    stats = action_stats(actions)
    assert stats.mean == pytest.approx((3, 20))
    assert stats.std == pytest.approx((np.sqrt(8 / 3), np.sqrt(200 / 3)))


def test_a_large_offset_does_not_spoil_the_deviation() -> None:
    actions = np.float32(10_000) + np.random.default_rng(0).normal(0, 1, (200_000, 1)).astype(np.float32)
    assert action_stats(actions).std[0] == pytest.approx(1, abs=0.01)


def test_a_constant_dimension_is_only_centred() -> None:
    actions = np.stack([np.full(1000, 0.1), np.arange(1000)], axis=1).astype(np.float32)
    stats = action_stats(actions)
    assert stats.std[0] == 1.0
    assert stats.mean[0] == pytest.approx(0.1)
    assert stats.std[1] > 1


@pytest.mark.parametrize("actions", [np.zeros((0, 2), np.float32), np.full((3, 2), np.nan, np.float32)])
def test_no_action_at_all_is_an_error(actions: np.ndarray) -> None:
    with pytest.raises(DataError, match="has an action"):
        action_stats(actions)


def numbered_episodes(lengths: list[int]) -> np.ndarray:
    """Actions (rows, 2): the episode's number and the row in it; NaN in each last row."""
    rows = [np.stack([np.full(n, e, np.float32), np.arange(n, dtype=np.float32)], 1) for e, n in enumerate(lengths)]
    for episode in rows:
        episode[-1:] = np.nan
    return np.concatenate(rows)


def test_recorded_actions_are_consecutive_ones_of_the_episodes_asked_for() -> None:
    lengths = [100, 3, 80, 60, 90]
    recorded = recorded_actions(numbered_episodes(lengths), np.array(lengths), np.array([4, 0, 1, 2]))
    assert recorded.dtype == np.float32
    assert recorded.shape == (50 + 30 + 40, RECORDED_STEPS, 2)  # every place where so many actions follow
    assert set(recorded[..., 0].flatten()) == {0.0, 2.0, 4.0}
    assert (np.ptp(recorded[..., 0], axis=1) == 0).all()
    assert (np.diff(recorded[..., 1], axis=1) == 1).all()
    assert len(np.unique(recorded[:, 0], axis=0)) == len(recorded)
    assert not (np.diff(recorded[:, 0, 0]) >= 0).all()  # any part of them is a fair sample


def test_of_many_recorded_actions_some_are_taken_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, ids = [400] * 50, np.arange(50)
    recorded = recorded_actions(numbered_episodes(lengths), np.array(lengths), ids)
    assert len(recorded) == RECORDED_SEQUENCES
    assert set(recorded[:, 0, 0]) == set(ids)
    assert np.array_equal(recorded, recorded_actions(numbered_episodes(lengths), np.array(lengths), ids))
    monkeypatch.setattr(stats_module, "RECORDED_SEQUENCES", 7)
    assert len(recorded_actions(numbered_episodes(lengths), np.array(lengths), ids)) == 7


def test_short_episodes_give_short_sequences() -> None:
    lengths = [4, 9, 6]
    recorded = recorded_actions(numbered_episodes(lengths), np.array(lengths), np.arange(3))
    assert recorded.shape == (4 + 1, 5, 2)
    single = recorded_actions(numbered_episodes([1, 2]), np.array([1, 2]), np.arange(2))
    assert single.tolist() == [[[1.0, 0.0]]]


def test_sequences_with_a_gap_are_left_out() -> None:
    actions = numbered_episodes([60])
    actions[5] = np.nan
    recorded = recorded_actions(actions, np.array([60]), np.array([0]))
    assert sorted(recorded[:, 0, 1]) == [6.0, 7.0, 8.0, 9.0]


def test_the_background_is_the_median_of_the_frames_of_some_episodes(tiny_store: Callable[..., EpisodeStore]) -> None:
    store = tiny_store([5, 40, 7])  # every pixel is the number of its row
    for episodes in ([0], [2], [0, 2], [1]):
        seen = background(store, np.array(episodes))
        rows = np.concatenate([np.arange(store.offsets[e], store.offsets[e] + store.lengths[e]) for e in episodes])
        assert seen.shape == (4, 4, 3)
        assert seen.dtype == np.uint8
        assert (seen == int(np.median(rows))).all(), episodes


def test_of_many_frames_the_background_takes_some_from_everywhere(
    tiny_store: Callable[..., EpisodeStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = tiny_store([100, 100], stride=2, phases=[1, 0]), list[np.ndarray]()
    honest = EpisodeStore.read_frames
    monkeypatch.setattr(EpisodeStore, "read_frames", lambda self, rows: read.append(rows) or honest(self, rows))
    background(store, np.array([0, 1]))
    assert len(read[0]) == 100
    assert set(read[0]) <= set(store.frame_rows)
    monkeypatch.setattr("lewm.data.stats.BACKGROUND_FRAMES", 5)
    background(store, np.array([0, 1]))
    assert read[1].tolist() == store.frame_rows[[0, 24, 49, 74, 99]].tolist()
    assert BACKGROUND_FRAMES % 2  # a median that is one of the values


def test_episodes_without_a_frame_have_no_background(tiny_store: Callable[..., EpisodeStore]) -> None:
    store = tiny_store([6, 1], stride=3, phases=[0, 2])
    with pytest.raises(DataError, match="have no frames"):
        background(store, np.array([1]))
