"""The scripted expert reaches any pose; replays follow their demonstrations as far as their noise lets them."""

import math
import os

import numpy as np
import pytest

from lewm.envs import env_entry, make_env
from lewm.envs.pusht import PushT
from lewm.envs.pusht_experts import PushTExpert, PushTReplay, TargetNoise, mirrored
from lewm.envs.pusht_geometry import TARGET_POSE, wrap_angle
from lewm.errors import DataError
from lewm.rng import stream
from lewm.types import Demonstration

NO_NOISE = {"max_noise": 0.0, "max_white_noise": 0.0, "start_noise": 0.0}
PUBLIC_DEMONSTRATIONS = os.environ.get("LEWM_PUSHT_DEMOS")


def at_pose(state: np.ndarray, pose: np.ndarray) -> bool:
    """Whether the block is within 20 px and π/9 of a pose, wherever the agent is."""
    near = np.linalg.norm(state[2:4] - pose[:2]) < 20
    return bool(near and abs(wrap_angle(state[4] - pose[2])) < math.pi / 9)


def run_expert(seed: int, expert: PushTExpert, goal: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, bool]:
    """States (L + 1, 7), absolute targets (L, 2), and whether the goal was reached."""
    env = PushT(obs_type="state")
    env.reset(seed=seed, options={} if goal is None else {"goal": goal})
    states, targets = [env.state], []
    for _ in range(env_entry("pusht").episode_steps):
        action = expert.act(env.state, env.goal)
        assert env.action_space.contains(action)
        targets.append(np.clip(env.state[:2] + 100.0 * action, 0, 512))
        states.append(env.step(action)[-1]["state"])
        if env.goal_reached():
            break
    return np.array(states), np.array(targets), env.goal_reached()


@pytest.fixture(scope="module")
def demonstrations() -> list[Demonstration]:
    """Three that the scripted expert gives, to the target."""
    goal = np.array([100.0, 400.0, *TARGET_POSE, 0.0, 0.0])
    episodes = [run_expert(seed, PushTExpert(stream(seed), max_noise=5.0), goal) for seed in range(3)]
    assert all(reached for *_, reached in episodes)
    return [Demonstration(states[:-1, :5], targets) for states, targets, _ in episodes]


@pytest.fixture(scope="module")
def public_demonstrations() -> list[Demonstration]:
    if not PUBLIC_DEMONSTRATIONS:
        pytest.skip("LEWM_PUSHT_DEMOS names no file of demonstrations")
    with np.load(PUBLIC_DEMONSTRATIONS) as file:
        cuts = file["episode_ends"][:-1]
        columns = [np.split(file[name].astype(np.float64), cuts) for name in ("state", "action")]
    return [Demonstration(states, actions) for states, actions in zip(*columns, strict=True)]


def replay(demonstration: Demonstration, seed: int = 0, **options: float) -> np.ndarray:
    """The states (L + 1, 7) of a replay."""
    env, expert = PushT(obs_type="state"), PushTReplay(stream(seed), demonstration, **options)
    env.reset(seed=seed)
    start, goal = expert.begin(env.state, env.goal)
    env.reset(options={"state": start, "goal": goal})
    return np.array([start, *(env.step(expert.act(env.state, goal))[-1]["state"] for _ in range(expert.steps))])


def block_deviation(states: np.ndarray, demonstration: Demonstration) -> float:
    """How far the block gets from where the demonstration has it, at most; px."""
    difference = states[: len(demonstration.states), 2:4] - demonstration.states[:, 2:4]
    return float(np.linalg.norm(difference, axis=1).max())


def test_without_noise_it_reaches_every_goal():
    lengths = []
    for seed in range(12):
        states, _, reached = run_expert(seed, PushTExpert(stream(seed), max_noise=0.0))
        assert reached, f"seed {seed}"
        lengths.append(len(states))
    assert np.mean(lengths) < 120


def test_with_its_noise_it_still_reaches_most_goals():
    poses = goals = 0
    for seed in range(20):
        env = make_env("pusht")
        env.reset(seed=seed)
        states, _, reached = run_expert(seed, PushTExpert(stream(seed, 1)))
        poses += any(at_pose(state, env.goal[2:5]) for state in states)
        goals += reached
    assert poses >= 16
    assert goals >= 12


def test_episodes_differ_in_their_noise():
    def roughness(seed: int) -> float:
        _, targets, _ = run_expert(0, PushTExpert(stream(seed)))
        return float(np.abs(np.diff(targets, 2, axis=0)).mean())

    values = [roughness(seed) for seed in range(8)]
    assert max(values) > 1.5 * min(values)


def test_target_noise_has_its_strength_and_its_memory():
    noise = TargetNoise(stream(0), std=20.0, correlation=4.0, white_std=0.0)
    values = np.array([noise.sample() for _ in range(20_000)])
    assert values.std() == pytest.approx(20, rel=0.05)
    assert np.corrcoef(values[4:, 0], values[:-4, 0])[0, 1] == pytest.approx(math.exp(-1), abs=0.05)
    white = TargetNoise(stream(0), std=0.0, correlation=4.0, white_std=10.0)
    values = np.array([white.sample() for _ in range(20_000)])
    assert values.std() == pytest.approx(10, rel=0.05)
    assert np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("mirror", [0.0, 1.0])
def test_without_noise_a_replay_follows_its_demonstration_to_the_target(demonstrations, mirror):
    for demonstration in demonstrations:
        shown = mirrored(demonstration) if mirror else demonstration
        states = replay(demonstration, mirror=mirror, **NO_NOISE)
        assert len(states) == len(demonstration.actions) + 1
        assert block_deviation(states, shown) < 0.01
        assert at_pose(states[-1], TARGET_POSE)


def test_the_mirror_image_keeps_the_target_and_is_its_own_inverse(demonstrations):
    demonstration = demonstrations[0]
    twice = mirrored(mirrored(demonstration))
    np.testing.assert_allclose(twice.states, demonstration.states, atol=1e-9)
    np.testing.assert_allclose(twice.actions, demonstration.actions, atol=1e-9)
    at_target = Demonstration(np.array([[10.0, 20.0, *TARGET_POSE]]), np.array([[10.0, 20.0]]))
    np.testing.assert_allclose(mirrored(at_target).states, [[492.0, 502.0, *TARGET_POSE]])


def test_replays_of_one_demonstration_differ_and_half_are_mirrored(demonstrations):
    demonstration = demonstrations[0]
    image = mirrored(demonstration)
    starts = np.array([PushTReplay(stream(seed), demonstration).begin(*np.zeros((2, 7)))[0] for seed in range(60)])
    from_original, from_image = (np.abs(starts[:, :4] - d.states[0, :4]).max(1) for d in (demonstration, image))
    assert 18 <= (from_original < from_image).sum() <= 42
    assert np.minimum(from_original, from_image).max() < 25
    assert len(np.unique(starts[:, 0])) == 60


def test_noise_lets_some_replays_miss_and_a_replay_never_ends_early(demonstrations):
    reached = [at_pose(replay(demonstrations[seed % 3], seed)[-1], TARGET_POSE) for seed in range(15)]
    assert sum(reached) < 15
    calm = replay(demonstrations[0], max_noise=1.0, max_white_noise=1.0, start_noise=0.5)
    assert len(calm) == len(demonstrations[0].actions) + 1


def test_a_target_out_of_reach_keeps_its_direction():
    far = Demonstration(np.array([[100.0, 100.0, 300.0, 300.0, 0.0]]), np.array([[300.0, 150.0]]))
    expert = PushTReplay(stream(0), far, mirror=0.0, **NO_NOISE)
    state, goal = expert.begin(np.zeros(7), np.zeros(7))
    np.testing.assert_allclose(expert.act(state, goal), [1.0, 0.25])


@pytest.mark.parametrize(("states", "actions"), [((3, 7), (3, 2)), ((3, 5), (2, 2)), ((0, 5), (0, 2))])
def test_a_demonstration_of_something_else_is_refused(states, actions):
    with pytest.raises(DataError, match=r"states \(L, 5\) and actions \(L, 2\)"):
        PushTReplay(stream(0), Demonstration(np.zeros(states), np.zeros(actions)))


@pytest.mark.parametrize("mirror", [0.0, 1.0])
def test_public_demonstrations_end_at_the_target(public_demonstrations, mirror):
    chosen = public_demonstrations[::8]
    deviations, ends = [], 0
    for demonstration in chosen:
        states = replay(demonstration, mirror=mirror, **NO_NOISE)
        deviations.append(block_deviation(states, mirrored(demonstration) if mirror else demonstration))
        ends += at_pose(states[-1], TARGET_POSE)
    assert np.median(deviations) < 0.001
    assert ends / len(chosen) > 0.95
