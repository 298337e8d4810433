"""Goals: drawn as often as they should be, never from where they may not come, and the same whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lewm.data.frames import open_frames
from lewm.data.goals import Goals
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows
from lewm.errors import ConfigError
from lewm.types import Array, GoalSampling, Inputs

TinyStore = Callable[..., EpisodeStore]
DRAWS = 40_000
# Episodes with a phase each: some without any frame, with one, or ending right where a frame is.
STRIDED = {
    1: ([20, 3, 25, 8], [0, 0, 0, 0]),
    2: ([20, 1, 25, 9], [1, 1, 0, 0]),
    3: ([21, 2, 26, 12], [0, 2, 1, 2]),
    5: ([33, 4, 27, 16], [2, 4, 0, 0]),
}


def inputs(frame_skip: int = 2, frames: int = 2, anchor: int = -1, **goals: GoalSampling) -> Inputs:
    return Inputs(frames, frame_skip, action_dim=2, image_size=4, goals=goals, anchor=anchor)


def draw(store: EpisodeStore, anchors: Any, frame_skip: int = 2, **options: Any) -> tuple[Array, Array]:
    """Rows and steps of many goals of one kind."""
    goals = Goals(store, np.arange(store.num_episodes), inputs(frame_skip, goal=GoalSampling(**options)))
    return goals.draw(np.broadcast_to(anchors, DRAWS), (1, 2))["goal"]


def assert_shares(found: Array, expected: dict[int, float]) -> None:
    """Values occur as often as expected, within four standard deviations of such counts, and no others do."""
    assert set(np.unique(found).tolist()) <= set(expected)
    for value, share in expected.items():
        assert abs((found == value).mean() - share) < 4 * np.sqrt(share * (1 - share) / len(found)), value


def windows_of(store: EpisodeStore, ids: Any, wanted: Inputs) -> Windows:
    return Windows(store, open_frames(store, "memory"), np.asarray(ids), wanted)


# -- how often ------------------------------------------------------------------------------------------------------


def test_shares_are_those_that_are_asked_for(tiny_store: TinyStore) -> None:
    store = tiny_store([5000, 5000])
    _, steps = draw(store, 100, current=0.2, future=0.5, random=0.3)
    # One row in ten thousand is drawn at random and is the anchor itself.
    assert_shares(np.minimum(steps, 1), {0: 0.2, 1: 0.5, -1: 0.3})


@pytest.mark.parametrize("kind", ["current", "future", "random"])
def test_a_share_of_one_leaves_nothing_to_the_others(tiny_store: TinyStore, kind: str) -> None:
    _, steps = draw(tiny_store([300] * 4), 7, **{"future": 0.0, kind: 1.0})
    expected = {"current": steps == 0, "future": steps > 0, "random": (steps == -1) | (steps == 0)}
    assert expected[kind].all()


def test_shares_whose_sum_is_rounded_leave_no_gap(tiny_store: TinyStore) -> None:
    _, steps = draw(tiny_store([300] * 4), 7, current=0.1 + 1e-9, future=0.9 - 1e-7)
    assert (steps >= 0).all(), "no random goal was asked for"


@pytest.mark.parametrize("stride", [1, 2])
def test_future_goals_are_uniform_up_to_the_end_or_so_many_rows(tiny_store: TinyStore, stride: int) -> None:
    store = tiny_store([8, 15, 9], stride=stride, phases=[0, 0, 0])
    rows, steps = draw(store, 12)  # in an episode of rows 8 to 22
    ahead = range(stride, 11, stride)
    assert_shares(steps, dict.fromkeys(ahead, 1 / len(ahead)))
    assert (rows == 12 + steps).all()
    _, near = draw(store, 12, max_steps=5)
    ahead = range(stride, 6, stride)
    assert_shares(near, dict.fromkeys(ahead, 1 / len(ahead)))


@pytest.mark.parametrize(("stride", "frame_skip"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_discounted_goals_are_geometric_in_frames(tiny_store: TinyStore, stride: int, frame_skip: int) -> None:
    store, gamma = tiny_store([400, 10], stride=stride), 0.8
    _, steps = draw(store, 0, frame_skip, gamma=gamma)
    assert (steps % frame_skip == 0).all()
    many = 12
    found = np.minimum(steps // frame_skip - 1, many)
    assert_shares(found, {n: (1 - gamma) * gamma**n for n in range(many)} | {many: gamma**many})
    # Three such frames are left before the episode ends: the third stands for all that lie beyond.
    last = 399 - 399 % frame_skip
    _, cut = draw(store, last - 3 * frame_skip, frame_skip, gamma=gamma)
    near = {1: 1 - gamma, 2: (1 - gamma) * gamma, 3: gamma**2}
    assert_shares(cut, {n * frame_skip: share for n, share in near.items()})
    _, limited = draw(store, 0, frame_skip, gamma=gamma, max_steps=3 * frame_skip)
    assert_shares(limited, {n * frame_skip: share for n, share in near.items()})
    _, next_one = draw(store, 0, frame_skip, gamma=0.0)
    assert (next_one == frame_skip).all()


def test_random_goals_are_uniform_over_frames_and_know_the_anchor(tiny_store: TinyStore) -> None:
    store = tiny_store([9, 2, 6], stride=2, phases=[1, 0, 0])
    rows, steps = draw(store, 3, future=0.0, random=1.0)
    assert_shares(rows, dict.fromkeys(store.frame_rows.tolist(), 1 / len(store.frame_rows)))
    assert ((steps == 0) == (rows == 3)).all()
    assert set(steps.tolist()) == {0, -1}, "other rows of the same episode are random ones as well"


# -- where from -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", STRIDED)
@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize("options", [{}, {"gamma": 0.95}, {"max_steps": 10}, {"gamma": 0.9, "max_steps": 10}])
def test_hindsight_never_leaves_the_episode_and_finds_all_of_it(
    tiny_store: TinyStore, stride: int, skip: int, options: dict[str, Any]
) -> None:
    """Every window, drawn so often that every goal that may come does come, and no other."""
    lengths, phases = STRIDED[stride]
    store, frame_skip = tiny_store(lengths, stride=stride, phases=phases), stride * skip
    wanted = inputs(frame_skip, goal=GoalSampling(**options))
    windows = windows_of(store, range(4), wanted)
    anchors = windows.rows(np.arange(len(windows)))[:, -1, 0]
    found: dict[int, set[int]] = {anchor: set() for anchor in anchors.tolist()}
    for key in range(600):
        batch = windows.batch(np.arange(len(windows)), (key,))
        rows = anchors + batch.steps["goal"].numpy()
        assert (batch.goals["goal"][:, 0, 0, 0].numpy() == rows).all(), "pixels are numbered by rows"
        for anchor, row in zip(anchors.tolist(), rows.tolist(), strict=True):
            found[anchor].add(row)
    for anchor, rows in found.items():
        episode = int(np.searchsorted(store.offsets, anchor, side="right")) - 1
        end = min(store.offsets[episode] + store.lengths[episode] - 1, anchor + options.get("max_steps", 1000))
        spacing = frame_skip if "gamma" in options else stride
        later = [row for row in store.frame_rows.tolist() if anchor < row <= end and (row - anchor) % spacing == 0]
        assert rows == set(later or [anchor])


def test_no_goal_of_training_is_a_validation_row_and_the_reverse(tiny_store: TinyStore) -> None:
    store = tiny_store([8, 10, 9, 11, 13], stride=2, phases=[0, 1, 0, 1, 1])
    every = GoalSampling(current=0.2, future=0.3, random=0.5)
    for ids in ([0, 2, 3], [1, 4]):
        windows = windows_of(store, ids, inputs(goal=every))
        own = {row for row in store.frame_rows if np.searchsorted(store.offsets, row, side="right") - 1 in ids}
        seen = set[int]()
        for key in range(300):
            seen |= set(windows.batch(np.arange(len(windows)), (key,)).goals["goal"][:, 0, 0, 0].tolist())
        assert seen == own, "all of their own, and nobody else's"


@pytest.mark.parametrize("anchor", [-3, -2, -1, 0, 1, 2])
def test_the_current_goal_is_the_frame_that_acts(tiny_store: TinyStore, anchor: int) -> None:
    goals = {"now": GoalSampling(current=1.0, future=0.0), "next": GoalSampling(gamma=0.0)}
    windows = windows_of(tiny_store([30]), [0], inputs(2, frames=3, anchor=anchor, **goals))
    batch = windows.batch(np.arange(len(windows)))
    assert batch.pixels is not None
    assert torch.equal(batch.goals["now"], batch.pixels[:, anchor])
    assert (batch.steps["now"] == 0).all()
    at_the_end = batch.steps["next"] == 0
    assert at_the_end.sum() == (1 if anchor % 3 == 2 else 0), "a window ends at most one row before its episode does"
    ahead = batch.goals["next"][~at_the_end, 0, 0, 0]
    assert torch.equal(ahead, batch.pixels[~at_the_end, anchor, 0, 0, 0] + 2)


# -- by whom --------------------------------------------------------------------------------------------------------

MIXED = {"value": GoalSampling(0.2, 0.5, 0.3, gamma=0.9), "actor": GoalSampling(0.0, 0.5, 0.5)}


def assert_equal(one: Any, other: Any) -> None:
    """The same batches: all tensors, bitwise."""
    assert len(one.tensors()) == len(other.tensors()) > 2
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_a_batch_are_together_the_whole(tiny_store: TinyStore, parts: int) -> None:
    windows = windows_of(tiny_store([40, 30]), [0, 1], inputs(**MIXED))
    indices, key = np.random.default_rng(0).permutation(len(windows))[:24], (3, 17)
    whole = windows.batch(indices, key)
    size = len(indices) // parts
    for first in range(0, 24, size):
        part = slice(first, first + size)
        assert_equal(windows.batch(indices, key, part), whole.map(lambda tensor, part=part: tensor[part]))


def test_a_batch_is_a_function_of_its_key(tiny_store: TinyStore) -> None:
    windows = windows_of(tiny_store([40, 30]), [0, 1], inputs(**MIXED))
    indices = np.arange(48)
    before = windows.batch(indices, (3, 17))
    others = [windows.batch(indices, key) for key in ((3, 18), (4, 17), (), (3, 17, 1))]
    assert_equal(windows.batch(indices, (3, 17)), before)
    for other in others:
        assert not torch.equal(other.steps["value"], before.steps["value"])


def test_names_are_drawn_independently(tiny_store: TinyStore) -> None:
    """The same sampling by two names: what one draws says nothing about the other."""
    store, half = tiny_store([2000, 2000]), GoalSampling(current=0.5, future=0.0, random=0.5)
    anchors, ids = np.full(DRAWS, 100), np.arange(2)
    both = Goals(store, ids, inputs(one=half, other=half)).draw(anchors, (5,))
    kinds = 2 * (both["one"][1] == 0) + (both["other"][1] == 0)
    assert_shares(kinds, dict.fromkeys(range(4), 0.25))
    first, second = (both[name][0][kinds == 0].astype(float) for name in ("one", "other"))
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(len(first))
    alone = Goals(store, ids, inputs(other=half)).draw(anchors, (5,))
    assert np.array_equal(alone["other"], both["other"]), "another name changes nothing"


# -- what cannot be drawn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"current": 0.5}, "shares that add up to 1, got current 0.5, future 1.0, random 0.0"),
        ({"current": -0.5, "future": 1.5}, "shares that add up to 1"),
        ({"future": float("nan")}, "shares that add up to 1"),
        ({"future": 0.0}, "shares that add up to 1"),
        ({"gamma": 1.0}, r"gamma in \[0, 1\), or none, got 1.0"),
        ({"gamma": -0.1}, r"gamma in \[0, 1\)"),
        ({"gamma": float("nan")}, r"gamma in \[0, 1\)"),
        ({"max_steps": 0}, "max_steps of at least 2, .* got 0"),
        ({"max_steps": 3, "gamma": 0.9}, "max_steps of at least 4, .* got 3"),
    ],
)
def test_impossible_goals_are_refused_by_name(tiny_store: TinyStore, options: dict[str, float], message: str) -> None:
    store = tiny_store([30], stride=2)
    with pytest.raises(ConfigError, match=f"goals 'far' .*{message}"):
        windows_of(store, [0], inputs(4, far=GoalSampling(**options)))  # type: ignore[arg-type]
