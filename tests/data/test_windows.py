"""Windows: aligned as drawn, never across episodes, never shared by training and validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lewm.data.frames import open_frames
from lewm.data.store import EpisodeStore, write_episodes
from lewm.data.windows import Windows, batch_indices, split_episodes
from lewm.errors import ConfigError, DataError
from lewm.types import GoalSampling, Inputs

TinyStore = Callable[..., EpisodeStore]


def make_windows(
    store: EpisodeStore, episodes: list[int], frames: int = 4, frame_skip: int = 2, cache: Any = "memory", **more: Any
) -> Windows:
    inputs = Inputs(frames, frame_skip, action_dim=2, **{"image_size": 4} | more)
    return Windows(store, open_frames(store, cache), np.array(episodes), inputs)


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
    strided = make_windows(store, [0, 1, 2], frames=3, frame_skip=4, cache=cache)
    dense = make_windows(whole, [0, 1, 2], frames=3, frame_skip=4)
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
    assert len(make_windows(store, [0], frames=2, frame_skip=10)) == 1


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
    assert len(make_windows(store, [1], frames=2)) == 7 - 4 + 1


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


# -- what other methods ask for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "phases"), [(1, [0, 0, 0]), (2, [0, 1, 1]), (4, [0, 3, 2])])
def test_windows_whose_last_action_is_missing_are_left_out(
    tiny_store: TinyStore, stride: int, phases: list[int]
) -> None:
    """Of episodes exactly as long as a window, one row longer, and longer than that."""
    store = tiny_store([8, 9, 20], stride=stride, phases=phases)
    whole = make_windows(store, [0, 1, 2], frames=2, frame_skip=4)
    acting = make_windows(store, [0, 1, 2], frames=2, frame_skip=4, last_block=True)
    last_rows = store.offsets + store.lengths - 1
    rows = whole.rows(np.arange(len(whole)))
    ends_in_nan = np.isin(rows[:, -1, -1], last_rows)
    assert ends_in_nan.any()
    np.testing.assert_array_equal(acting.rows(np.arange(len(acting))), rows[~ends_in_nan])
    covered = rows[~ends_in_nan].ravel()
    assert np.isfinite(store.actions[covered]).all(), "nothing had to be made up"
    left = np.unique(np.searchsorted(store.offsets, rows[~ends_in_nan, 0, 0], side="right") - 1).tolist()
    assert acting.skipped == 3 - len(left)
    assert 0 not in left, "the episode that is exactly as long as a window"
    assert 2 in left
    with pytest.raises(DataError, match="needs 8 rows, each with an action, but the longest of 1 episodes has 8"):
        make_windows(store, [0], frames=2, frame_skip=4, last_block=True)


def test_an_action_that_others_recorded_in_the_last_row_counts(tmp_path: Path) -> None:
    action = np.arange(8, dtype=np.float32)[:, None]
    write_episodes(tmp_path / "d.h5", [{"pixels": np.zeros((8, 4, 4, 3), np.uint8), "action": action}], {})
    with EpisodeStore(tmp_path / "d.h5") as store:
        windows = make_windows(store, [0], frames=2, frame_skip=4, last_block=True)
        assert windows.batch(np.array([0])).actions[0, -1, -1].tolist() == [7.0]


def test_what_the_agent_senses_is_that_of_the_frames(tiny_store: TinyStore) -> None:
    store = tiny_store([9, 12])
    batch = make_windows(store, [1], proprio=True).batch(np.array([0, 2]))
    assert batch.proprio is not None
    assert batch.proprio.dtype == torch.float32
    assert batch.proprio[..., 0].tolist() == [[9, 11, 13, 15], [11, 13, 15, 17]]
    assert batch.proprio.shape == (2, 4, 1)
    assert make_windows(store, [1]).batch(np.array([0])).proprio is None


def test_data_without_proprio_or_with_gaps_in_it_is_refused(tmp_path: Path) -> None:
    episode = {"pixels": np.zeros((8, 4, 4, 3), np.uint8), "action": np.zeros((8, 2), np.float32)}
    write_episodes(tmp_path / "without.h5", [episode], {})
    gap = np.where(np.arange(8) == 5, np.nan, 0.0)[:, None]
    write_episodes(tmp_path / "gap.h5", [episode | {"proprio": gap}], {})
    for name, message in (("without", "no column 'proprio', which .* only action"), ("gap", "no finite .* at row 5")):
        with EpisodeStore(tmp_path / f"{name}.h5") as store, pytest.raises(DataError, match=message):
            make_windows(store, [0], proprio=True)


def test_a_method_that_sees_nothing_gets_no_pixels(tiny_store: TinyStore) -> None:
    store = tiny_store([9, 12])
    batch = Windows(store, None, np.arange(2), Inputs(4, 2, 2, proprio=True)).batch(np.array([0, 3]))
    assert batch.pixels is None
    assert batch.features is None
    assert len(batch.tensors()) == 2, "actions and proprio"
    with pytest.raises(ConfigError, match="goals far are frames, but the method asks for no pixels"):
        Windows(store, None, np.arange(2), Inputs(4, 2, 2, goals={"far": GoalSampling()}))


def test_features_stand_in_place_of_pixels_and_of_goals(tiny_store: TinyStore) -> None:
    class RowNumbers:
        def gather(self, rows: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(rows).half()[..., None, None].expand(*rows.shape, 3, 2)

    inputs = Inputs(4, 2, 2, features="numbers", goals={"far": GoalSampling()})
    windows = Windows(tiny_store([30]), RowNumbers(), np.arange(1), inputs)
    batch = windows.batch(np.array([2, 5]), (1,))
    assert batch.pixels is None
    assert batch.features is not None
    assert batch.features.shape == (2, 4, 3, 2)
    assert batch.features[:, :, 0, 0].tolist() == [[2, 4, 6, 8], [5, 7, 9, 11]]
    assert batch.goals["far"].shape == (2, 3, 2)
    assert torch.equal(batch.goals["far"][:, 0, 0], torch.tensor([8, 11]) + batch.steps["far"])


@pytest.mark.parametrize("anchor", [4, -5])
def test_an_anchor_that_is_no_frame_is_refused(tiny_store: TinyStore, anchor: int) -> None:
    with pytest.raises(ConfigError, match=f"one of a window's 4 frames, got {anchor}"):
        make_windows(tiny_store([30]), [0], anchor=anchor)
