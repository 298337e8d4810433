"""Push-T's physics and drawing, against their definition and against gym-pusht."""

import math
import time

import cv2
import numpy as np
import pytest

from lewm.envs.pusht import STATE_HIGH, STATE_LOW, PushT, PushTPhysics
from lewm.envs.pusht_drawing import PushTDrawing
from lewm.envs.pusht_experts import PushTExpert
from lewm.envs.pusht_geometry import TEE_CORNERS, away_from_tee, to_body, to_world, wrap_angle
from lewm.errors import EnvError
from lewm.rng import stream

FAR_AWAY = (450.0, 450.0, 150.0, 150.0, 0.0, 0.0, 0.0)  # the agent touches nothing here


@pytest.fixture
def env() -> PushT:
    env = PushT(obs_type="state")
    env.reset(seed=0)
    return env


@pytest.fixture
def public(monkeypatch):
    """gym-pusht's environment."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pusht = pytest.importorskip("gym_pusht.envs.pusht", reason="gym-pusht is not installed")
    public = pusht.PushTEnv(obs_type="state")
    public.reset(seed=0)
    return public


def put(public, state: np.ndarray) -> None:
    """Put gym-pusht into a state whose agent rests. (Its own way of setting a state moves the block.)"""
    public.reset(seed=0)
    public.agent.position = state[:2].tolist()
    public.block.angle = state[4]
    public.block.position = state[2:4].tolist()
    public.space.step(public.dt)


def public_state(public) -> np.ndarray:
    return np.concatenate([public.get_obs(), public.agent.velocity])


def deviation(state: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two states' positions and angles."""
    difference = (state - other)[:5]
    difference[4] = wrap_angle(difference[4])
    return float(np.abs(difference).max())


def random_states(count: int, seed: int = 0) -> np.ndarray:
    low, high = (20, 20, 80, 80, 0, 0, 0), (490, 490, 430, 430, 2 * math.pi, 0, 0)
    return stream(seed).uniform(low, high, (count, 7))


def hunt(state: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A target for an agent that harasses the block wherever it is, walls or not."""
    return np.clip(state[:2] + 100 * rng.uniform(-1, 1, 2) + 0.3 * (state[2:4] - state[:2]), 0, 512)


def test_a_free_agent_follows_spring_and_damper(env):
    env.reset(options={"state": FAR_AWAY})
    env.step(np.array([-0.4, 0.2]))
    position, velocity, target = np.array([450.0, 450.0]), np.zeros(2), np.array([410.0, 470.0])
    for _ in range(10):
        velocity = velocity + 0.01 * (100 * (target - position) - 20 * velocity)
        position = position + 0.01 * velocity
    np.testing.assert_allclose(env.state, [*position, 150, 150, 0, *velocity], atol=1e-9)


def test_the_target_stays_in_the_world(env):
    env.reset(options={"state": FAR_AWAY})
    for _ in range(30):
        env.step(np.array([1.0, 0.0]))
    np.testing.assert_allclose(env.state[:2], [512, 450], atol=0.1)


@pytest.mark.parametrize(("x", "turns"), [(256.0, 0), (300.0, 1), (212.0, -1)])
def test_a_push_on_the_bar_moves_the_block_and_turns_it_by_its_lever(env, x, turns):
    env.reset(options={"state": (x, 180.0, 256.0, 200.0, 0.0, 0.0, 0.0)})
    for _ in range(5):
        env.step(np.array([0.0, 0.3]))
    _, _, block_x, block_y, angle, *_ = env.state
    assert block_y > 220
    assert np.sign(round(float(wrap_angle(angle)), 6)) == turns
    if turns == 0:
        assert block_x == pytest.approx(256, abs=1e-6)


def test_the_block_stands_still_when_nothing_pushes_it(env):
    env.reset(options={"state": (256.0, 160.0, 256.0, 200.0, 0.3, 0.0, 0.0)})
    env.step(np.array([0.0, 0.8]))
    env.step(np.array([0.0, -1.0]))
    moved = env.state
    assert moved[3] > 200
    for _ in range(3):
        env.step(np.array([0.0, -1.0]))
    np.testing.assert_allclose(env.state[2:5], moved[2:5], atol=0.2)  # the end of a penetration's correction


def test_walls_stop_the_block(env):
    env.reset(options={"state": (256.0, 200.0, 256.0, 240.0, 0.0, 0.0, 0.0)})
    for _ in range(30):
        env.step(np.array([0.0, 0.3]) if env.state[1] < 330 else np.zeros(2))
    assert to_world(TEE_CORNERS, env.state[2:5]).max() < 507


def test_whole_episodes_match_gym_pusht(public):
    """The expert's: contacts on every face, many times an episode."""
    physics, env, touched = PushTPhysics(), PushT(obs_type="state"), 0.0
    for seed in range(5):
        env.reset(seed=seed)
        state, expert = env.state, PushTExpert(stream(seed), max_noise=10.0)
        put(public, state)
        for _ in range(100):
            target = np.clip(state[:2] + 100.0 * expert.act(state, env.goal), 0, 512)
            after = physics.advance(state, target)
            touched += float(np.linalg.norm(after[2:4] - state[2:4]))
            state = after
            public.step(target)
            assert deviation(state, public_state(public)) < 1e-6
    assert touched > 300


def test_single_actions_match_gym_pusht_while_the_block_is_off_the_walls(public):
    physics, env, rng, deviations = PushTPhysics(), PushT(obs_type="state"), stream(1), []
    for seed in range(12):
        env.reset(seed=seed)
        put(public, env.state)
        for _ in range(40):
            before = public_state(public)
            target = hunt(before, rng)
            public.step(target)
            after = public_state(public)
            corners = to_world(TEE_CORNERS, before[2:5]), to_world(TEE_CORNERS, after[2:5])
            if np.min(corners) > 9 and np.max(corners) < 502 and not np.array_equal(before[2:5], after[2:5]):
                deviations.append(deviation(physics.advance(before, target), after))
    assert len(deviations) > 100
    assert np.mean(np.array(deviations) < 1e-6) > 0.99


def test_the_next_state_depends_on_nothing_but_state_and_target():
    """Not even on impulses that pymunk remembers while the block is squeezed against walls."""
    used, rng = PushTPhysics(), stream(2)
    for start in random_states(8, seed=5):
        state = start
        for _ in range(60):
            target = hunt(state, rng)
            after = used.advance(state, target)
            np.testing.assert_array_equal(after, PushTPhysics().advance(state, target))
            assert (after >= STATE_LOW).all()
            assert (after <= STATE_HIGH).all()
            state = after


def test_a_state_restored_in_contact_continues_exactly(env):
    rng = stream(3)
    for seed in range(5):
        env.reset(seed=seed)
        for _ in range(30):
            env.step((hunt(env.state, rng) - env.state[:2]) / 100)
        checkpoint, actions = env.state, rng.uniform(-1, 1, (20, 2))
        expected = [env.step(action)[-1]["state"] for action in actions]
        restored = PushT(obs_type="state")
        restored.reset(seed=9, options={"state": checkpoint})
        np.testing.assert_array_equal([restored.step(action)[-1]["state"] for action in actions], expected)


def test_frames_match_gym_pushts(public):
    states = random_states(200)
    frames = PushT(resolution=224).render_states(states)
    differences = []
    for state, frame in zip(states, frames, strict=True):
        put(public, state)
        # Overlapping bodies have been pushed apart: draw what is there.
        public.agent.position, public.block.angle = state[:2].tolist(), state[4]
        public.block.position = state[2:4].tolist()
        public.space.reindex_shapes_for_body(public.agent)
        public.space.reindex_shapes_for_body(public.block)
        expected = public._get_img(public._draw(), 224, 224)
        differences.append(np.abs(frame.astype(int) - expected).mean())
    assert np.mean(differences) < 0.2  # of 255
    assert max(differences) < 0.5


@pytest.mark.parametrize("resolution", [28, 56, 64, 96, 112, 224, 225, 256, 600])
def test_a_frame_is_the_large_one_scaled(resolution):
    states = random_states(12, seed=4)
    states[0, :2] = states[0, 2:4]  # one over the other
    large = PushTDrawing(512).draw(states)
    for frame, whole in zip(PushTDrawing(resolution).draw(states), large, strict=True):
        difference = frame.astype(int) - cv2.resize(whole, (resolution, resolution))
        assert np.abs(difference).max() <= 1


def test_a_frame_does_not_depend_on_the_frames_before_it(env):
    states = random_states(6, seed=6)
    together = env.render_states(states)
    for state, frame in zip(states, together, strict=True):
        np.testing.assert_array_equal(PushT().render_states(state[None])[0], frame)


def test_what_is_outside_the_picture_is_not_drawn(env):
    outside = [(-90.0, 600.0, -256.0, -256.0, 0.0, 0.0, 0.0), (600.0, 600.0, 768.0, 300.0, 0.0, 0.0, 0.0)]
    first, second = env.render_states(np.array(outside))
    np.testing.assert_array_equal(first, second)


def test_success_measures_both_positions_together_and_the_angle_around_the_circle(env):
    goal = np.array([100.0, 100.0, 300.0, 300.0, 0.1, 0.0, 0.0])
    offsets = {
        (14.0, 0.0, 0.0, 14.0, 0.0, 500.0, 0.0): True,
        (14.2, 0.0, 0.0, 14.2, 0.0, 0.0, 0.0): False,
        (0.0, 0.0, 19.9, 0.0, 0.0, 0.0, 0.0): True,
        (0.0, 0.0, 0.0, 0.0, math.pi / 9 - 0.001, 0.0, 0.0): True,
        (0.0, 0.0, 0.0, 0.0, math.pi / 9 + 0.001, 0.0, 0.0): False,
        (0.0, 0.0, 0.0, 0.0, 2 * math.pi - 0.2, 0.0, 0.0): True,
    }
    states = goal + np.array(list(offsets))
    np.testing.assert_array_equal(env.is_success(states, goal), list(offsets.values()))
    np.testing.assert_array_equal(env.is_success(states.reshape(2, 3, 7), goal).ravel(), list(offsets.values()))


def test_start_and_goal_leave_room_for_the_agent(env):
    angles = []
    for seed in range(50):
        env.reset(seed=seed)
        for state in (env.state, env.goal):
            points = to_world(TEE_CORNERS, state[2:5])
            assert points.min() >= 45
            assert points.max() <= 467
            assert np.linalg.norm(away_from_tee(to_body(state[:2], state[2:5]))) >= 40
            assert state[5:].tolist() == [0, 0]
            angles.append(state[4])
    assert np.histogram(angles, 4, (0, 2 * math.pi))[0].min() >= 10


@pytest.mark.parametrize(("name", "pixel"), [("agent", (450, 450)), ("block", (150, 165)), ("target", (256, 270))])
def test_each_object_can_be_painted(name, pixel):
    env = PushT(resolution=512)
    env.reset(options={"state": FAR_AWAY})
    own = env.render()
    env.paint(name, (250, 0, 0))
    painted = env.render()
    x, y = pixel
    assert painted[y, x, 0] > 240
    assert painted[y, x, 1] == 0
    changed = (painted != own).any(axis=-1)
    assert 500 < changed.sum() < 10_000, "only that object changes"
    env.paint(name, None)
    np.testing.assert_array_equal(env.render(), own)


def test_objects_are_teleported(env):
    env.reset(options={"state": FAR_AWAY})
    env.teleport("agent", (20.0, 30.0))
    env.teleport("block", (200.0, 210.0))
    assert env.state.tolist() == [20, 30, 200, 210, 0, 0, 0]
    env.teleport("block", (220.0, 230.0, 1.0))
    assert env.state.tolist() == [20, 30, 220, 230, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "position", "message"),
    [
        ("agent", (1.0, 2.0, 3.0), r"agent is put to a position \(x, y\), got"),
        ("block", (1.0,), r"a pose \(x, y, angle\), got"),
        ("block", (1.0, 9999.0), "must lie between"),
        ("target", (1.0, 2.0), "Move the block instead"),
    ],
)
def test_teleporting_explains_what_it_cannot_do(env, name, position, message):
    before = env.state
    with pytest.raises(EnvError, match=message):
        env.teleport(name, position)
    np.testing.assert_array_equal(env.state, before)


@pytest.mark.slow
def test_a_thousand_rendered_steps_a_second():
    env, rng, best = PushT(), stream(0), math.inf
    env.reset(seed=0)
    for _ in range(5):
        begin = time.process_time()
        for action in rng.uniform(-1, 1, (200, 2)):
            env.step(action)
        best = min(best, time.process_time() - begin)
    assert 200 / best > 1000
