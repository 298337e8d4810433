"""An expert that wanders off: how often, for how long, and that it is the expert otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from lewm.envs.base import Expert
from lewm.envs.exploration import LONGEST, SHORTEST, TAKEN_OVER, WanderingExpert
from lewm.types import Array

ACTION = np.full(4, 0.123, np.float32)
STEPS = 400


class Constant(Expert):
    """Always the same action, and a start of its own."""

    steps = STEPS

    def begin(self, state: Array, goal: Array) -> tuple[Array, Array]:
        return state + 1, goal + 2

    def act(self, state: Array, goal: Array) -> Array:  # noqa: ARG002
        return ACTION.copy()


def actions_of(seed: int, exploration: float) -> Array:
    expert = WanderingExpert(Constant(), np.random.default_rng([1, seed]), exploration)
    return np.stack([expert.act(np.zeros(1), np.zeros(1)) for _ in range(STEPS)])


def test_episode_and_goal_are_the_experts():
    expert = WanderingExpert(Constant(), np.random.default_rng(0), 0.5)
    assert expert.steps == STEPS
    assert expert.begin(np.zeros(1), np.zeros(1)) == (np.ones(1), 2 * np.ones(1))


@pytest.mark.parametrize("exploration", [0.3, 0.8])
def test_the_share_of_other_actions_is_up_to_what_was_asked_for(exploration: float):
    others = [(actions_of(seed, exploration) != ACTION).any(axis=1) for seed in range(300)]
    # A stretch of n actions in which no number is taken over looks like the expert: rare with four numbers.
    shares = np.array([other.mean() for other in others]) / (1 - (1 - TAKEN_OVER) ** len(ACTION))
    assert shares.mean() == pytest.approx(exploration / 2, abs=0.03)
    assert shares.min() < 0.1 * exploration
    assert np.percentile(shares, 90) == pytest.approx(0.9 * exploration, abs=0.08)


def test_other_actions_are_held_with_noise_and_within_bounds():
    actions = np.concatenate([actions_of(seed, 0.5) for seed in range(50)])
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    other = actions != ACTION
    assert other.any(axis=1).mean() > 0.1
    taken = other[other.any(axis=1)].mean()
    assert taken == pytest.approx(TAKEN_OVER, abs=0.05)
    pairs = other[1:, 0] & other[:-1, 0]  # in a row, so nearly always of one stretch
    assert np.corrcoef(actions[1:, 0][pairs], actions[:-1, 0][pairs])[0, 1] > 0.4


def test_stretches_last_as_long_as_they_should():
    lengths = []
    for seed in range(30):
        other = (actions_of(seed, 0.1) != ACTION).any(axis=1).astype(int)
        starts, ends = (np.flatnonzero(np.diff(other, prepend=0, append=0) == change) for change in (1, -1))
        lengths += [end - start for start, end in zip(starts, ends, strict=True) if end < STEPS]
    assert len(lengths) > 30
    assert min(lengths) == SHORTEST
    assert np.percentile(lengths, 90) <= LONGEST, "seldom does one follow another without a gap"
    assert np.mean(lengths) == pytest.approx((SHORTEST + LONGEST) / 2, abs=2)
