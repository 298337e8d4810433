"""Cube is OGBench's, restores exactly even while it grasps, and is drawn where it is."""

import numpy as np
import pytest

pytest.importorskip("mujoco")

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.generate import generate_episode
from lewm.data.store import EpisodeStore
from lewm.envs import cube, make_expert
from lewm.envs.cube import (
    CUBE_POSITION,
    EFFECTOR_POSITION,
    EFFECTOR_YAW,
    GRIPPER_CLOSED,
    GRIPPER_CONTACT,
    SUCCESS_DISTANCE,
    Cube,
    merge_vertices,
)
from lewm.envs.cube_expert import MISTAKE_FARTHEST, CubeExpert, MistakenCubeExpert
from lewm.errors import DataError, EnvError
from lewm.rng import stream

GREEN = (0, 255, 0)


@pytest.fixture
def env() -> Cube:
    env = Cube(resolution=112, obs_type="state")
    env.reset(seed=0)
    return env


def episode(seed: int, steps: int, **settings: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States (steps + 1, 47) and actions (steps, 5) of the expert, and the goal (47,)."""
    env = Cube(obs_type="state")
    env.reset(seed=seed)
    expert = CubeExpert(stream(seed), **settings)
    states, actions = [env.state], []
    for _ in range(steps):
        actions.append(expert.act(env.state, env.goal))
        states.append(env.step(actions[-1])[0])
    return np.array(states), np.array(actions), env.goal


def green_centre(frame: np.ndarray) -> np.ndarray:
    """The mean (column, row) of green pixels."""
    red, green, blue = np.moveaxis(frame.astype(int), -1, 0)
    rows, columns = np.nonzero((green > red + 50) & (green > blue + 50))
    assert len(rows)
    return np.array([columns.mean(), rows.mean()])


def test_restored_in_mid_grasp_it_continues_exactly():
    states, actions, goal = episode(seed=3, steps=80)
    held = np.nonzero(states[:-10, GRIPPER_CONTACT] > 0.5)[0]
    assert len(held) > 10, "the episode must have a grasp"
    restored = Cube(obs_type="state")
    restored.set_goal(goal)
    for start in held[:: len(held) // 5]:
        restored.set_state(states[start])
        np.testing.assert_array_equal(restored.state, states[start])
        for step in range(start, start + 10):
            np.testing.assert_array_equal(restored.step(actions[step])[0], states[step + 1])


def test_it_moves_as_ogbench_does():
    from ogbench.manipspace.envs.cube_env import CubeEnv

    peer = CubeEnv("single", mode="data_collection", terminate_at_goal=False)
    peer.reset(seed=0)
    env = Cube(obs_type="state")
    env.reset(seed=0)
    env.set_state(env._at_rest(peer.data.qpos))
    rng = stream(0)
    for _ in range(5):
        drift = rng.uniform(-1, 1, 5)  # the same for a while: it adds up to a way
        for _ in range(6):
            peer.step(drift)
            env.step(drift)
    info = peer.compute_ob_info()
    # OGBench plans from kinematics that are one of 25 physics steps old.
    np.testing.assert_allclose(env.state[EFFECTOR_POSITION], info["proprio/effector_pos"], atol=0.01)
    np.testing.assert_allclose(env.state[CUBE_POSITION], info["privileged/block_0_pos"], atol=0.01)
    assert env.state[GRIPPER_CLOSED] == pytest.approx(info["proprio/gripper_opening"][0], abs=0.05)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_actions_move_the_effector_along_their_axis(env, axis):
    env.reset(seed=2)
    for direction in (1.0, -1.0):
        before = env.state
        for _ in range(4):
            env.step(direction * np.eye(5)[axis])
        way = (env.state - before)[EFFECTOR_POSITION]
        assert np.argmax(np.abs(way)) == axis
        assert direction * way[axis] > 0.02


def test_actions_turn_the_effector_and_close_the_gripper(env):
    before = env.state
    for _ in range(6):
        env.step(np.array([0, 0, 0, 1.0, 1.0]))
    turned = (env.state[EFFECTOR_YAW] - before[EFFECTOR_YAW] + np.pi) % (2 * np.pi) - np.pi
    assert abs(turned) > 0.3
    assert before[GRIPPER_CLOSED] < 0.1
    assert env.state[GRIPPER_CLOSED] > 0.5


def test_what_follows_from_the_joints_cannot_be_set(env):
    state = env.state
    state[EFFECTOR_POSITION] = 9.0
    env.set_state(state)
    assert (np.abs(env.state[EFFECTOR_POSITION]) < 1).all()


@pytest.mark.parametrize(("distance", "reached"), [(0.0, True), (0.0399, True), (0.0401, False), (0.2, False)])
def test_success_is_the_distance_of_the_cube_alone(env, distance, reached):
    goal = env.goal
    state = env.state
    state[CUBE_POSITION] = goal[CUBE_POSITION] + np.array([0.6, 0.0, 0.8]) * distance
    assert pytest.approx(0.04) == SUCCESS_DISTANCE
    assert env.is_success(state, goal) == reached
    assert env.is_success(np.stack([state] * 2), goal).tolist() == [reached] * 2


def test_starts_and_goals_lie_in_reach_at_rest(env):
    states = np.array([(env.reset(seed=seed)[0], env.goal) for seed in range(40)])
    assert not env.is_success(states[:, 0], states[:, 1]).any()
    states = states.reshape(-1, 47)
    assert (states[:, CUBE_POSITION] >= (0.3, -0.3, 0.02)).all()
    assert (states[:, CUBE_POSITION] <= (0.55, 0.3, 0.02)).all()
    assert (states[:, EFFECTOR_POSITION] >= np.array([0.25, -0.35, 0.2]) - 0.001).all()
    assert (states[:, EFFECTOR_POSITION] <= np.array([0.6, 0.35, 0.35]) + 0.001).all()
    assert (states[:, 21:41] == 0).all()


def test_a_teleported_cube_is_drawn_where_it_is(env):
    env.paint("cube", GREEN)
    upright = np.array([-1.57, -1.57, 0.5, -1.57, -1.57, 0.0])  # hides nothing of the floor
    env.set_state(env._at_rest(np.concatenate([upright, np.zeros(11), [1.0, 0.0, 0.0, 0.0]])))
    centres = {}
    for position in ((0.35, 0.0, 0.02), (0.55, 0.0, 0.02), (0.45, -0.25, 0.02), (0.45, 0.25, 0.02), (0.45, 0.0, 0.2)):
        env.teleport("cube", position)
        np.testing.assert_array_equal(env.state[CUBE_POSITION], position)
        centres[position] = green_centre(env.render())
    far, near, left, right, high = centres.values()
    assert far[1] < near[1] - 15, "farther from the camera is higher in the frame"
    assert left[0] < right[0] - 40, "y grows to the right"
    assert high[1] < far[1], "up is up"
    with pytest.raises(EnvError, match=r"\(x, y, z\) in m"):
        env.teleport("cube", (0.4, 0.0))


def test_the_goal_is_not_drawn_and_success_does_not_show(env):
    frame = env.render()
    env.set_goal(env.state)
    assert env.goal_reached()
    np.testing.assert_array_equal(env.render(), frame)


def test_the_coarse_meshes_look_like_the_fine_ones(env, monkeypatch):
    states = episode(seed=1, steps=40)[0][::10]
    coarse = env.render_states(states).astype(int)
    monkeypatch.setattr(cube, "MESH_GRID", 1e-7)
    fine_scene = cube.fixed_scene.__wrapped__()
    assert fine_scene.nmeshface > 4 * cube.fixed_scene().nmeshface
    monkeypatch.setattr(cube, "fixed_scene", lambda: fine_scene)
    fine = Cube(resolution=112).render_states(states).astype(int)
    difference = np.abs(fine - coarse)
    assert difference.mean() < 1.5
    assert (difference.max(axis=-1) > 32).mean() < 0.02


def test_merging_vertices_keeps_the_shape():
    side = np.linspace(0, 1, 21)
    vertices = np.stack([*np.meshgrid(side, side), np.zeros((21, 21))], axis=-1).reshape(-1, 3)
    corner = (np.arange(20)[:, None] * 21 + np.arange(20)).reshape(-1, 1)
    faces = np.concatenate([corner + np.array(triangle) for triangle in ((0, 1, 22), (0, 22, 21))])
    merged, kept = merge_vertices(vertices, faces, 0.2)
    assert 4 <= len(merged) <= 36
    assert 10 < len(kept) < len(faces) / 8
    assert len(np.unique(np.sort(kept, axis=1), axis=0)) == len(kept)
    edges = merged[kept[:, 1:]] - merged[kept[:, :1]]
    areas = np.cross(edges[:, 0], edges[:, 1])[:, 2] / 2
    assert (areas > 0).all(), "faces still look the same way"
    assert 0.7 < areas.sum() <= 1


def test_the_expert_carries_the_cube_to_the_goal_and_then_elsewhere():
    for seed in (2, 3):
        states, actions, goal = episode(seed, steps=110, random_probability=0.0)
        assert np.abs(actions).max() <= 1
        hits = np.nonzero(np.linalg.norm((states - goal)[:, CUBE_POSITION], axis=1) <= SUCCESS_DISTANCE)[0]
        assert len(hits), "the goal is reached"
        assert states[:, CUBE_POSITION][:, 2].max() > 0.1, "the cube is carried, not pushed"
        assert np.linalg.norm((states[-1] - goal)[CUBE_POSITION]) > SUCCESS_DISTANCE, "it is on its way elsewhere"


def test_the_expert_has_random_numbers_of_its_own(env):
    expert = make_expert("cube", stream(0))
    assert expert.steps == 200
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    for _ in range(5):
        expert.act(env.state, env.goal)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def closings(seed: int, mistakes: float) -> tuple[list[float], list[float]]:
    """Of each time that the gripper closes: how far from the cube, in m, and how far the cube is lifted afterwards."""
    env = Cube(obs_type="state")
    env.reset(seed=seed)
    expert = MistakenCubeExpert(CubeExpert(stream(seed), noise=0, random_probability=0), stream(seed, 1), mistakes)
    assert expert.steps == 200
    states = [env.state]
    for _ in range(expert.steps):
        states.append(env.step(expert.act(env.state, env.goal))[0])
    states = np.array(states)
    closed = states[:, GRIPPER_CLOSED] > 0.3
    away, lifted = [], []
    for step in np.flatnonzero(~closed[:-1] & closed[1:]):
        later = states[step : step + 25]
        away.append(np.linalg.norm(later[0, EFFECTOR_POSITION][:2] - later[0, CUBE_POSITION][:2]))
        lifted.append(np.ptp(later[:, CUBE_POSITION][:, 2]))
    return away, lifted


def test_a_mistaken_expert_closes_its_gripper_beside_the_cube_and_carries_nothing():
    away, lifted = (np.concatenate(each) for each in zip(*(closings(seed, 0.99) for seed in range(6)), strict=True))
    missed = away > 0.05  # more than the open gripper is wide
    assert missed.sum() >= 5
    assert away.max() < MISTAKE_FARTHEST + 0.05
    assert np.median(lifted[missed]) < 0.01
    assert (~missed).sum() >= 3, "it is not always mistaken"
    assert np.median(lifted[~missed]) > 0.05


def test_an_expert_that_is_hardly_ever_mistaken_grasps_the_cube():
    away, lifted = (np.concatenate(each) for each in zip(*(closings(seed, 1e-9) for seed in range(3)), strict=True))
    assert len(away) >= 3
    assert away.max() < 0.03
    assert lifted.min() > 0.05


def test_mistakes_are_part_of_what_a_collection_is_known_by(tmp_path):
    collect("cube", tmp_path / "data.h5", CollectConfig(episodes=2, resolution=28, workers=1, mistakes=0.5))
    with EpisodeStore(tmp_path / "data.h5") as store:
        assert store.attributes["mistakes"] == 0.5
        states = store.read_column("state")
    plain, mistaken = (generate_episode("cube", 28, 0, 0, draw=False, mistakes=share)["state"] for share in (0, 0.5))
    np.testing.assert_array_equal(states[: len(mistaken)], mistaken)
    assert not np.array_equal(plain, mistaken)
    with pytest.raises(DataError, match=r"mistakes is 0\.5 there, but 0\.0 was asked for"):
        collect("cube", tmp_path / "data.h5", CollectConfig(episodes=3, resolution=28, workers=1))
