"""Reacher is dm_control's, can be put anywhere, and is drawn where it is."""

import math

import numpy as np
import pytest

pytest.importorskip("mujoco")

from lewm.envs import make_env, make_expert
from lewm.envs.reacher import SUCCESS_ANGLE, Reacher
from lewm.errors import EnvError
from lewm.rng import stream

GREEN = (0, 255, 0)
# Half of what the camera sees at the finger's height, 0.74 m below it, with a field of view of 45 degrees.
VIEW = 0.74 * math.tan(math.radians(22.5))


def green_centre(frame: np.ndarray) -> np.ndarray:
    """The mean position (x, y) of green pixels in m, x to the right and y up, from the centre."""
    red, green, blue = np.moveaxis(frame.astype(int), -1, 0)
    rows, columns = np.nonzero((green > red + 60) & (green > blue + 60))
    assert len(rows)
    pixel = 2 * VIEW / len(frame)
    return np.array([columns.mean() + 0.5, len(frame) - rows.mean() - 0.5]) * pixel - VIEW


def test_it_moves_as_the_suites_reacher_does():
    from dm_control import suite

    peer = suite.load("reacher", "easy", task_kwargs={"random": 0})
    peer.reset()
    env = Reacher(obs_type="state")
    env.reset(seed=0)
    env.set_state(np.concatenate([peer.physics.data.qpos, peer.physics.data.qvel]))
    assert peer.control_timestep() == pytest.approx(0.02)
    for action in stream(1).uniform(-1, 1, (100, 2)):
        peer.step(action)
        env.step(action)
    expected = np.concatenate([peer.physics.data.qpos, peer.physics.data.qvel])
    np.testing.assert_allclose(env.state, expected, atol=1e-9)


def test_restored_at_the_joint_limit_it_continues_exactly():
    env = Reacher(obs_type="state")
    env.reset(options={"state": (0.0, 2.7, 0.0, 5.0), "goal": (3.0, 0.0, 0.0, 0.0)})
    push = np.array([0.3, 1.0])
    for _ in range(20):
        env.step(push)
    checkpoint = env.state
    assert checkpoint[1] > 2.7, "the wrist must be at its limit, where the solver has work"
    expected = [env.step(push)[0] for _ in range(20)]
    other = Reacher(obs_type="state")
    other.set_goal(env.goal)
    other.set_state(checkpoint)
    np.testing.assert_array_equal([other.step(push)[0] for _ in range(20)], expected)


def test_nothing_ends_or_restarts_it_on_the_way():
    env = Reacher(obs_type="state")
    env.reset(options={"state": (0.0, 0.5, 0.0, 0.0), "goal": (3.0, -2.0, 0.0, 0.0)})
    states = np.array([env.step(np.array([1.0, 0.0]))[0] for _ in range(1200)])  # the suite would end after 1000
    assert np.abs(np.diff(states[:, :2], axis=0)).max() < 0.3
    assert states[-1, 0] > 20, "it keeps turning"


@pytest.mark.parametrize(
    ("offset", "reached"),
    [
        ((0.0, 0.0), True),
        ((SUCCESS_ANGLE - 1e-6, -SUCCESS_ANGLE + 1e-6), True),
        ((SUCCESS_ANGLE + 1e-6, 0.0), False),
        ((0.0, SUCCESS_ANGLE + 1e-6), False),
        ((2 * math.pi + 0.04, 0.0), True),
        ((-4 * math.pi - 0.06, 0.0), False),
        ((math.pi, 0.0), False),
    ],
)
def test_success_is_per_joint_modulo_full_turns(offset, reached):
    env = Reacher(obs_type="state")
    goal = np.array([3.1, -1.0, 0.0, 0.0])
    state = goal + np.array([*offset, 7.0, -7.0])  # velocities do not matter
    assert env.is_success(state, goal) == reached
    assert env.is_success(goal, state) == reached
    assert env.is_success(np.stack([state] * 3), goal).tolist() == [reached] * 3


def test_starts_and_goals_are_configurations_at_rest_that_differ():
    env = Reacher(obs_type="state")
    starts, goals = [], []
    for seed in range(200):
        starts.append(env.reset(seed=seed)[0])
        goals.append(env.goal)
    for states in map(np.array, (starts, goals)):
        assert (np.abs(states[:, 0]) <= math.pi).all()
        assert (np.abs(states[:, 1]) <= math.radians(160)).all()
        assert (np.ptp(states[:, :2], axis=0) > (6.0, 5.3)).all(), "over all of the range"
        assert (states[:, 2:] == 0).all()
    assert not env.is_success(np.array(starts), np.array(goals)).any()


@pytest.mark.parametrize("position", [(0.2, 0.05), (-0.1, 0.15), (0.03, -0.12)])
def test_the_finger_is_drawn_where_it_is_put(position):
    env = Reacher()
    env.reset(seed=0)
    env.paint("finger", GREEN)
    for wrist in (1.0, -1.0):
        env.set_state(np.array([0.3, wrist, 2.0, -3.0]))
        env.teleport("finger", position)
        np.testing.assert_allclose(green_centre(env.render()), position, atol=0.004)
        assert np.sign(env.state[1]) == wrist
        assert env.state[2:].tolist() == [2.0, -3.0]


def test_an_arm_is_put_to_angles_and_its_finger_only_where_it_reaches():
    env = Reacher(obs_type="state")
    env.reset(seed=0)
    env.teleport("arm", (1.0, -0.5))
    assert env.state.tolist() == [1.0, -0.5, 0.0, 0.0]
    for unreachable in ((0.2, 0.2), (0.0, 0.03)):
        with pytest.raises(EnvError, match=r"finger reaches 0\.042 to 0\.24 m"):
            env.teleport("finger", unreachable)
    with pytest.raises(EnvError, match="in rad"):
        env.teleport("arm", (1.0, 2.0, 3.0))


def test_neither_target_nor_goal_is_drawn():
    env = Reacher(resolution=112)
    env.reset(seed=0)
    frame = env.render()
    env.set_goal(np.zeros(4))
    np.testing.assert_array_equal(env.render(), frame)
    red, green, blue = np.moveaxis(frame.astype(int), -1, 0)
    assert ((red > 150) & (green < 120) & (blue > 80)).sum() == 0, "the suite's target is a red ball"


def test_the_expert_is_rough_or_smooth_and_deaf_to_the_goal():
    changes = []
    for seed in range(20):
        expert = make_expert("reacher", stream(seed))
        assert expert.steps == 200
        actions = np.array([expert.act(np.zeros(4), np.zeros(4)) for _ in range(200)])
        assert actions.dtype == np.float32
        assert np.abs(actions).max() <= 1
        changes.append(np.abs(np.diff(actions, axis=0)).mean() / np.abs(actions).mean())
    rough = np.array(changes) > 1.2  # 4/3 for i.i.d. uniform actions
    assert 4 <= rough.sum() <= 16
    assert np.array(changes)[~rough].max() < 1.1


def test_random_torques_take_the_arm_far():
    env = make_env("reacher")
    env.reset(seed=0)
    expert = next(e for e in (make_expert("reacher", stream(s)) for s in range(9)) if not e._rough)
    states = np.array([env.step(expert.act(env.state, env.goal))[0] for _ in range(200)])
    assert (np.ptp(states[:, :2], axis=0) > 1.0).all()
