"""The expert finds its way, and its noise is what the data needs."""

import contextlib

import numpy as np
import pytest

from lewm.data.generate import generate_episode
from lewm.envs import env_entry, make_env, make_expert
from lewm.envs.experts import TwoRoomExpert
from lewm.rng import derive_seed, stream


def steps_to_goal(expert: TwoRoomExpert, seed: int, options: dict | None = None, limit: int = 500) -> int:
    """Steps until the goal is reached, ``limit`` if it is not."""
    env = make_env("tworoom")
    env.reset(seed=seed, options=options)
    for step in range(1, limit):
        if env.step(expert.act(env.state, env.goal))[2]:
            return step
    return limit


def test_without_noise_it_always_arrives_without_detours():
    for seed in range(50):
        # The longest way, from corner to door to corner, is 357 px: 72 steps of 5 px.
        assert steps_to_goal(TwoRoomExpert(stream(seed), 0.0, 0.0), seed) <= 75


@pytest.mark.parametrize("goal", [(124.0, 203.0), (203.0, 203.0), (124.0, 21.0)])
@pytest.mark.parametrize("start", [(100.0, 203.0), (102.0, 49.0), (21.0, 49.0), (100.0, 21.0)])
def test_it_does_not_get_stuck_beside_the_door(start, goal):
    for a, b in ((start, goal), (goal, start)):
        expert = TwoRoomExpert(stream(0), 0.0, 0.0)
        assert steps_to_goal(expert, 0, {"state": a, "goal": b}) <= 75


def test_within_a_room_it_goes_straight():
    expert = TwoRoomExpert(stream(0), 0.0, 0.0)
    action = expert.act(np.array([40.0, 180.0]), np.array([70.0, 140.0]))
    np.testing.assert_allclose(action, [0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(expert.act(np.array([40.0, 180.0]), np.array([40.0, 180.0])), [0, 0])


def test_from_the_other_room_it_heads_for_the_door_until_it_is_there():
    expert = TwoRoomExpert(stream(0), 0.0, 0.0)
    np.testing.assert_allclose(expert.act(np.array([52.0, 129.0]), np.array([172.0, 49.0])), [0.6, -0.8])
    np.testing.assert_allclose(expert.act(np.array([101.0, 49.0]), np.array([131.0, 89.0])), [1, 0])
    np.testing.assert_allclose(expert.act(np.array([102.0, 49.0]), np.array([132.0, 89.0])), [0.6, 0.8])


def test_noise_is_added_before_clipping():
    expert = TwoRoomExpert(stream(0), noise_std=2.0, repeat_probability=0.0)
    actions = np.array([expert.act(np.array([40.0, 100.0]), np.array([90.0, 100.0])) for _ in range(4000)])
    assert np.abs(actions).max() == 1
    # P(1 + 2ε >= 1) = 1/2 along the way; P(|2ε| >= 1) = 0.617 across it.
    assert (actions[:, 0] == 1).mean() == pytest.approx(0.5, abs=0.03)
    assert (np.abs(actions[:, 1]) == 1).mean() == pytest.approx(0.617, abs=0.03)


def test_actions_repeat_with_the_given_probability():
    expert = TwoRoomExpert(stream(0), noise_std=0.1, repeat_probability=0.05)
    actions = np.array([expert.act(np.array([40.0, 100.0]), np.array([70.0, 140.0])) for _ in range(4000)])
    repeated = (actions[1:] == actions[:-1]).all(axis=1)
    assert repeated.mean() == pytest.approx(0.05, abs=0.015)


def test_collected_episodes_have_the_length_of_the_papers():
    limit = env_entry("tworoom").episode_steps
    lengths = [
        steps_to_goal(make_expert("tworoom", stream(0, index, 1)), derive_seed(0, index), limit=limit)
        for index in range(300)
    ]
    # The paper's 92, within three standard errors of 300 episodes.
    assert np.mean(lengths) == pytest.approx(92, abs=5)


@pytest.mark.parametrize("name", ["tworoom", "pusht", "reacher", "cube"])
def test_an_episode_does_not_depend_on_what_its_environment_did_before(name: str):
    if name in ("reacher", "cube"):
        pytest.importorskip("mujoco")
    with contextlib.closing(make_env(name, resolution=28, obs_type="state")) as used:
        generate_episode(name, 28, 0, 3, env=used)
        again = generate_episode(name, 28, 0, 4, frame_stride=5, env=used)
    fresh = generate_episode(name, 28, 0, 4, frame_stride=5)
    assert again.keys() == fresh.keys()
    for column, values in fresh.items():
        np.testing.assert_array_equal(again[column], values, err_msg=column)
