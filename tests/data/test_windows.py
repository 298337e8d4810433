"""Windows: aligned as drawn, never across episodes, never shared by training and validation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lewm.data.frames import open_frames
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, batch_indices, split_episodes
from lewm.errors import DataError

TinyStore = Callable[..., EpisodeStore]


def make_windows(store: EpisodeStore, episodes: list[int], history: int = 3, frame_skip: int = 2) -> Windows:
    return Windows(store, open_frames(store, "memory"), np.array(episodes), history, frame_skip)


def test_frames_and_action_blocks_are_aligned(tiny_store: TinyStore) -> None:
    windows = make_windows(tiny_store([9, 12]), [0, 1])
    # 8 rows a window: starts 0, 1 in the first episode; 9 .. 13 in the second.
    assert len(windows) == 2 + 5
    batch = windows.batch(np.array([1, 2]))
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.shape == (2, 4, 4, 4, 3)
    assert batch.pixels[:, :, 0, 0, 0].tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert batch.actions.dtype == torch.float32
    assert batch.actions.shape == (2, 4, 2, 2)
    assert batch.actions[0, :, :, 1].tolist() == [[-1, -2], [-3, -4], [-5, -6], [-7, 0]], "NaN became 0"
    assert batch.actions[1, :, :, 0].tolist() == [[9, 10], [11, 12], [13, 14], [15, 16]]


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_windows_of_strided_frames_are_those_of_all_frames_that_exist(tiny_store: TinyStore, cache: str) -> None:
    lengths, phases = [20, 3, 25], [1, 0, 2]
    store, whole = tiny_store(lengths, name="s.h5", stride=2, phases=phases), tiny_store(lengths)
    strided = Windows(store, open_frames(store, cache), np.arange(3), history=2, frame_skip=4)
    dense = make_windows(whole, [0, 1, 2], history=2, frame_skip=4)
    starts = strided.rows(np.arange(len(strided)))[:, 0, 0]
    # 12 rows a window: the last one starts at step 8 of the first episode and at step 13 of the last.
    assert starts.tolist() == [1, 3, 5, 7, *(23 + step for step in (2, 4, 6, 8, 10, 12))]
    assert strided.skipped == 1
    of_start = {row: index for index, row in enumerate(dense.rows(np.arange(len(dense)))[:, 0, 0].tolist())}
    expected = dense.batch(np.array([of_start[row] for row in starts.tolist()]))
    got = strided.batch(np.arange(len(strided)))
    assert torch.equal(got.pixels, expected.pixels)
    assert torch.equal(got.actions, expected.actions)


def test_a_frame_skip_that_the_stride_does_not_divide_is_refused(tiny_store: TinyStore) -> None:
    store = tiny_store([20], stride=5)
    with pytest.raises(DataError, match=r"one frame in 5 rows.* multiple of that, got 4"):
        make_windows(store, [0], frame_skip=4)
    assert len(make_windows(store, [0], history=1, frame_skip=10)) == 1


def test_every_window_stays_in_its_episode_and_is_finite(tiny_store: TinyStore) -> None:
    store = tiny_store([9, 7, 12, 8])
    windows = make_windows(store, [0, 1, 2, 3])
    rows = windows.rows(np.arange(len(windows))).reshape(len(windows), -1)
    episode = np.searchsorted(store.offsets, rows, side="right") - 1
    assert (episode == episode[:, :1]).all()
    assert len(np.unique(rows[:, 0])) == len(windows) == 2 + 0 + 5 + 1
    assert windows.skipped == 1
    actions = windows.batch(np.arange(len(windows))).actions
    assert torch.isfinite(actions).all()
    # The replaced action may only be the very last of a window.
    last_rows = store.offsets + store.lengths - 1
    assert not np.isin(rows[:, :-1], last_rows).any()


def test_no_row_of_a_validation_episode_is_reachable_from_training(tiny_store: TinyStore) -> None:
    store = tiny_store([8, 10, 9, 11, 8, 13, 9, 10, 8, 9])
    train, val = split_episodes(store.num_episodes, val_fraction=0.3)
    assert sorted([*train, *val]) == list(range(10))
    assert len(val) == 3
    reached = {}
    for name, ids in (("train", train), ("val", val)):
        windows = make_windows(store, list(ids))
        reached[name] = set(windows.rows(np.arange(len(windows))).ravel().tolist())
        pixels = windows.batch(np.arange(len(windows))).pixels
        assert set(pixels.unique().tolist()) <= reached[name]
    assert reached["train"].isdisjoint(reached["val"])
    assert len(reached["train"] | reached["val"]) == store.num_rows


def test_the_split_is_the_released_one_and_leaves_neither_side_empty() -> None:
    shuffled = np.random.default_rng(np.random.SeedSequence((3072,))).permutation(50)
    assert split_episodes(50, 0.1)[1].tolist() == sorted(shuffled[:5])
    assert [len(ids) for ids in split_episodes(2, 0.01)] == [1, 1]
    assert [len(ids) for ids in split_episodes(2, 0.99)] == [1, 1]
    with pytest.raises(DataError, match="at least one episode each, got 1"):
        split_episodes(1, 0.5)


def test_only_short_episodes_are_an_error_that_says_what_is_needed(tiny_store: TinyStore) -> None:
    store = tiny_store([5, 7, 3])
    with pytest.raises(DataError, match="needs 8 rows, but the longest of 3 episodes has 7"):
        make_windows(store, [0, 1, 2])
    assert len(make_windows(store, [1], history=1)) == 7 - 4 + 1


def test_an_epoch_sees_every_window_once_and_drops_the_incomplete_batch() -> None:
    first = np.concatenate([batch_indices(23, 5, step, seed=1) for step in range(4)])
    second = np.concatenate([batch_indices(23, 5, step, seed=1) for step in range(4, 8)])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 20
    assert set(first.tolist()) <= set(range(23))
    assert first.tolist() != second.tolist()


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    later = batch_indices(1000, 8, 700, seed=5)
    for step in range(5):  # other requests in between change nothing
        batch_indices(1000, 8, step, seed=9)
    np.testing.assert_array_equal(batch_indices(1000, 8, 700, seed=5), later)
    assert batch_indices(1000, 8, 700, seed=6).tolist() != later.tolist()
    with pytest.raises(DataError, match=r"batch of 8 .* has 7"):
        batch_indices(7, 8, 0, seed=0)
