"""TwoRoom's geometry, drawing, goals and errors."""

import numpy as np
import pytest

from lewm.envs.tworoom import TwoRoom
from lewm.errors import EnvError
from lewm.rng import stream

LEFT_EDGE, RIGHT_EDGE = 100.0, 124.0
DOOR_LOW, DOOR_HIGH = 49 - 15.75, 49 + 15.75


@pytest.fixture
def env() -> TwoRoom:
    env = TwoRoom(obs_type="state")
    env.reset(seed=0)
    return env


def after(env: TwoRoom, start: tuple[float, float], *actions: tuple[float, float]) -> list[float]:
    """The position after some actions from ``start``."""
    env.set_state(np.array(start))
    for action in actions:
        env.step(np.array(action))
    return env.state.tolist()


def reference_frame(x: float, y: float) -> np.ndarray:
    """The definition at 224 px, pixel by pixel."""
    frame = np.zeros((224, 224, 3))
    for row in range(224):
        for column in range(224):
            in_border = not (14 <= row < 210 and 14 <= column < 210)
            in_wall = 107 <= column < 117 and not 35 <= row < 63
            background = np.zeros(3) if in_border or in_wall else np.full(3, 255.0)
            squared = (column + 0.5 - x) ** 2 + (row + 0.5 - y) ** 2
            alpha = np.exp(-squared / (2 * 7**2))
            frame[row, column] = (1 - alpha) * background + alpha * np.array([255.0, 0.0, 0.0])
    return frame


def mean_pool(image: np.ndarray, factor: int) -> np.ndarray:
    side = len(image) // factor
    return image.reshape(side, factor, side, factor, 3).mean(axis=(1, 3))


def test_a_step_is_five_pixels_times_the_clipped_action(env):
    assert after(env, (50, 100), (1, -0.5)) == [55, 97.5]
    assert after(env, (50, 100), (7, -1.5)) == [55, 95]


def test_the_border_keeps_the_radius_out(env):
    assert after(env, (23, 23), (-1, -1)) == [21, 21]
    assert after(env, (202, 202), (1, 1)) == [203, 203]


@pytest.mark.parametrize(("x", "towards_wall", "edge"), [(98, 1, LEFT_EDGE), (126, -1, RIGHT_EDGE)])
def test_the_wall_keeps_the_radius_out_but_lets_slide(env, x, towards_wall, edge):
    assert after(env, (x, 150), (towards_wall, 0.5)) == [edge, 152.5]
    assert after(env, (edge, 150), (towards_wall, 1)) == [edge, 155]
    assert after(env, (edge, 150), (-towards_wall, 0)) == [edge - 5 * towards_wall, 150]


@pytest.mark.parametrize("y", [DOOR_LOW, 49, DOOR_HIGH])
def test_the_door_lets_through_both_ways(env, y):
    assert after(env, (98, y), *[(1, 0)] * 6) == [128, y]
    assert after(env, (126, y), *[(-1, 0)] * 6) == [96, y]


@pytest.mark.parametrize("y", [DOOR_LOW - 0.01, DOOR_HIGH + 0.01])
def test_the_door_has_its_size_and_margin(env, y):
    assert after(env, (98, y), *[(1, 0)] * 6) == [LEFT_EDGE, y]


def test_leaving_the_door_sideways_ends_on_the_side_of_the_middle_the_agent_was_on(env):
    assert after(env, (111, 64), (0, 1)) == [LEFT_EDGE, 69]
    assert after(env, (112, 64), (0, 1)) == [RIGHT_EDGE, 69]


def test_random_walks_are_never_inside_the_wall_and_change_rooms_only_through_the_door(env):
    rng = stream(0)
    crossings = 0
    for seed in range(20):
        env.reset(seed=seed, options={"state": (95, 70)})
        previous = env.state
        for action in rng.uniform(-2, 2, (300, 2)):
            x, y = env.step(action)[-1]["state"]
            assert x <= LEFT_EDGE or x >= RIGHT_EDGE or DOOR_LOW <= y <= DOOR_HIGH
            if (x < 112) != (previous[0] < 112):
                crossings += 1
                assert DOOR_LOW <= y <= DOOR_HIGH
            previous = np.array([x, y])
    assert crossings >= 10


def test_success_means_less_than_16_pixels(env):
    env.set_goal(np.array([60.0, 60.0]))
    env.set_state(np.array([60.0, 76.0]))
    assert not env.goal_reached()
    env.set_state(np.array([60.0, 75.99]))
    assert env.goal_reached()


def test_is_success_takes_leading_dimensions(env):
    states = np.array([[[30.0, 30.0], [50.0, 30.0]], [[30.0, 50.0], [39.0, 39.0]]])
    np.testing.assert_array_equal(env.is_success(states, np.array([30.0, 30.0])), [[True, False], [False, True]])


def test_reaching_the_goal_ends_with_reward_one(env):
    env.reset(options={"state": (40, 100), "goal": (62, 100)})
    _, reward, terminated, truncated, info = env.step(np.array([1.0, 0.0]))
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)
    _, reward, terminated, truncated, info = env.step(np.array([1.0, 0.0]))
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_reset_puts_agent_and_goal_in_different_rooms_clear_of_the_wall(env):
    starts_left = []
    for seed in range(100):
        env.reset(seed=seed)
        left, right = sorted((env.state[0], env.goal[0]))
        assert 21 <= left <= LEFT_EDGE
        assert RIGHT_EDGE <= right <= 203
        starts_left.append(env.state[0] < 112)
    assert 30 <= sum(starts_left) <= 70


def test_reset_options_override_and_the_goal_stays_in_the_other_room(env):
    for seed in range(10):
        env.reset(seed=seed, options={"state": (30, 40)})
        assert env.state.tolist() == [30, 40]
        assert env.goal[0] >= RIGHT_EDGE
    env.reset(seed=0, options={"state": (30, 40), "goal": (31, 90)})
    assert env.goal.tolist() == [31, 90]


@pytest.mark.parametrize("position", [(60.3, 141.8), (112.0, 49.0), (21.0, 203.0), (100.0, 70.5)])
def test_frame_matches_the_definition(env, position):
    difference = env.render_states(np.array([position]))[0] - reference_frame(*position)
    assert np.abs(difference).max() <= 1


def test_small_frame_is_the_mean_of_the_large_one():
    positions = np.array([[61.0, 140.0], [170.0, 140.0]])
    large = TwoRoom(resolution=224).render_states(positions).astype(float)
    small = TwoRoom(resolution=56).render_states(positions).astype(float)
    # The dot only takes green away, so the brighter of two frames is the background.
    expected = mean_pool(large.max(axis=0), 4)[:, :, 1]
    assert np.abs(small.max(axis=0)[:, :, 1] - expected).max() <= 1
    assert 0 < expected[30, 26] < 255, "the wall's edge cuts through this pixel"
    # The dot is sampled at pixel centres instead: over 4 px a Gaussian of 7 px hardly differs from its mean.
    assert np.abs(small[0] - mean_pool(large[0], 4)).max() <= 16


@pytest.mark.parametrize("resolution", [28, 56, 100, 224])
def test_the_dot_is_where_the_state_says(resolution):
    frame = TwoRoom(resolution=resolution).render_states(np.array([[50.0, 150.0]]))[0].astype(float)
    redness = frame[:, :, 0] - frame[:, :, 1]
    centres = (np.arange(resolution) + 0.5) * 224 / resolution
    assert np.average(centres, weights=redness.sum(axis=0)) == pytest.approx(50, abs=0.2)
    assert np.average(centres, weights=redness.sum(axis=1)) == pytest.approx(150, abs=0.2)


def test_pixels_observe_the_frame():
    env = TwoRoom(resolution=56)
    observation, _ = env.reset(seed=1)
    np.testing.assert_array_equal(observation, env.render())
    moved = env.step(np.array([0.0, 1.0]))[0]
    np.testing.assert_array_equal(moved, env.render())
    assert not np.array_equal(moved, observation)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((1.0, 2.0, 3.0), r"must have shape \(2,\), got \(3,\)"),
        ((np.nan, 50.0), "must be finite"),
        ((0.2, 0.7), "must lie between"),
        (("left", "top"), r"must be numbers of shape \(2,\)"),
    ],
)
def test_bad_state_or_goal_is_explained_and_changes_nothing(env, state, message):
    before, goal = env.state, env.goal
    for attempt in (env.set_state, env.set_goal, lambda bad: env.reset(options={"state": bad})):
        with pytest.raises(EnvError, match=message):
            attempt(state)
    with pytest.raises(EnvError, match="TwoRoom's states"):
        env.render_states([(50.0, 50.0), state])
    np.testing.assert_array_equal(env.state, before)
    np.testing.assert_array_equal(env.goal, goal)


def test_bad_action_is_explained_and_changes_nothing(env):
    before = env.state
    with pytest.raises(EnvError, match=r"TwoRoom's action must have shape \(2,\), got \(1,\)"):
        env.step(np.zeros(1))
    with pytest.raises(EnvError, match="must be finite"):
        env.step(np.array([np.inf, 0.0]))
    np.testing.assert_array_equal(env.state, before)


def test_step_without_a_goal_is_explained():
    env = TwoRoom()
    before = env.state
    with pytest.raises(EnvError, match=r"no goal yet: call reset\(\) or set_goal\(\)"):
        env.step(np.ones(2))
    np.testing.assert_array_equal(env.state, before)


def test_bad_arguments_are_explained(env):
    with pytest.raises(EnvError, match="Did you mean 'pixels'"):
        TwoRoom(obs_type="pixel")  # type: ignore[arg-type]
    with pytest.raises(EnvError, match="render_mode 'human'"):
        TwoRoom(render_mode="human")
    with pytest.raises(EnvError, match="positive"):
        TwoRoom(resolution=0)
    with pytest.raises(EnvError, match="Did you mean 'state'"):
        env.reset(options={"stat": (50, 50)})
