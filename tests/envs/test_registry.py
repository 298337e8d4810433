"""Every registered environment keeps the promises of WorldEnv; the registry explains what it cannot do."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from lewm.envs import (
    EnvEntry,
    Intervention,
    WorldEnv,
    env_entry,
    env_names,
    make_env,
    make_expert,
    register_env,
    registry,
)
from lewm.errors import EnvError
from lewm.rng import stream

ALL_ENVS = pytest.mark.parametrize("name", env_names())


def entry_with(**changes: object) -> EnvEntry:
    """An entry that points to TwoRoom, with some fields changed."""
    fields = vars(env_entry("tworoom")) | {"name": "other", "gym_id": "lewm/Other-v0"} | changes
    return EnvEntry(**fields)


@pytest.fixture
def clean_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "ENTRIES", dict(registry.ENTRIES))
    known_ids = set(gymnasium.registry)
    yield
    for gym_id in set(gymnasium.registry) - known_ids:
        del gymnasium.registry[gym_id]


def rollout(env: WorldEnv, actions: np.ndarray) -> tuple[np.ndarray, list[bool]]:
    """States after each action, and whether each ended the episode."""
    steps = [env.step(action) for action in actions]
    return np.array([info["state"] for *_, info in steps]), [terminated for _, _, terminated, _, _ in steps]


def random_actions(env: WorldEnv, count: int, seed: int) -> np.ndarray:
    assert isinstance(env.action_space, gymnasium.spaces.Box)
    return stream(seed).uniform(env.action_space.low, env.action_space.high, (count, *env.action_space.shape))


OF_THE_WORLD = {"pusht": ("block",), "cube": ("cube", "gripper_contact")}  # what the agent cannot sense of itself


@ALL_ENVS
def test_the_agent_senses_itself_and_not_the_world(name):
    env = make_env(name, resolution=28)
    env.reset(seed=3)
    states = np.stack([env.state, env.state])
    foreign = [i for i, part in enumerate(env.state_names) if part.startswith(OF_THE_WORLD.get(name, "-"))]
    states[1, foreign] += 1.0
    sensed = env.proprio(states)
    assert sensed.shape == (2, len(env.proprio_names))
    np.testing.assert_array_equal(sensed[0], sensed[1])
    own = set(env.state_names) - {env.state_names[i] for i in foreign}
    unseen = own - set(env.proprio_names)
    assert unseen == ({"agent_vx", "agent_vy"} if name == "pusht" else set())


@ALL_ENVS
def test_what_the_agent_senses_comes_back_with_the_state(name):
    """An evaluation begins in a recorded state, and knows no more."""
    env = make_env(name, resolution=28)
    env.reset(seed=4)
    for action in random_actions(env, 8, 0):
        env.step(action)
    sensed, state = env.proprio(env.state), env.state
    env.reset(seed=5)
    env.set_state(state)
    np.testing.assert_allclose(env.proprio(env.state), sensed, atol=1e-9)


@ALL_ENVS
@pytest.mark.parametrize("obs_type", ["pixels", "state"])
@pytest.mark.filterwarnings("error")
def test_gymnasium_accepts_it(name, obs_type):
    env = gymnasium.make(env_entry(name).gym_id, resolution=28, obs_type=obs_type)
    check_env(env.unwrapped, skip_render_check=False)


@ALL_ENVS
def test_entry_describes_the_environment(name):
    entry, env = env_entry(name), make_env(name)
    assert env.action_space.shape == (entry.action_dim,)
    assert env.state_space.shape == (len(env.state_names),)
    assert gymnasium.spec(entry.gym_id).max_episode_steps == entry.episode_steps


@ALL_ENVS
def test_same_seed_same_episode(name):
    first, second, other = make_env(name), make_env(name), make_env(name)
    observations = [env.reset(seed=seed)[0] for env, seed in ((first, 7), (second, 7), (other, 8))]
    np.testing.assert_array_equal(observations[0], observations[1])
    np.testing.assert_array_equal(first.goal, second.goal)
    assert not np.array_equal(observations[0], observations[2])
    actions = random_actions(first, 50, seed=1)
    np.testing.assert_array_equal(rollout(first, actions)[0], rollout(second, actions)[0])


@ALL_ENVS
def test_expert_is_determined_by_its_generator(name):
    env = make_env(name)
    env.reset(seed=0)
    experts = [make_expert(name, stream(5)) for _ in range(2)]
    for _ in range(20):
        first, second = (expert.act(env.state, env.goal) for expert in experts)
        np.testing.assert_array_equal(first, second)
        assert env.action_space.contains(first)
        env.step(first)


@ALL_ENVS
def test_restored_state_continues_exactly(name):
    env = make_env(name)
    env.reset(seed=3)
    rollout(env, random_actions(env, 10, seed=1))
    checkpoint, goal = env.state, env.goal
    actions = random_actions(env, 30, seed=2)
    expected = rollout(env, actions)

    restored = make_env(name)
    restored.set_state(checkpoint)
    restored.set_goal(goal)
    np.testing.assert_array_equal(restored.state, checkpoint)
    states, terminated = rollout(restored, actions)
    np.testing.assert_array_equal(states, expected[0])
    assert terminated == expected[1]


@ALL_ENVS
def test_render_states_draws_what_render_draws_and_disturbs_nothing(name):
    env = make_env(name, resolution=56)
    env.reset(seed=0)
    states, _ = rollout(env, random_actions(env, 6, seed=1))
    before = env.state
    frames = env.render_states(states)
    np.testing.assert_array_equal(env.state, before)
    for state, frame in zip(states, frames, strict=True):
        env.set_state(state)
        np.testing.assert_array_equal(env.render(), frame)
    assert frames.dtype == np.uint8
    assert frames.shape == (6, 56, 56, 3)
    assert len(np.unique(frames.reshape(6, -1), axis=0)) == 6


def test_default_drawing_equals_the_fast_one():
    env = make_env("tworoom", resolution=56)
    states = stream(0).uniform(21, 203, (5, 2))
    before = env.state
    np.testing.assert_array_equal(WorldEnv._draw_states(env, states), env.render_states(states))
    np.testing.assert_array_equal(env.state, before)


@ALL_ENVS
def test_what_is_handed_out_is_a_copy(name):
    env = make_env(name)
    observation, info = env.reset(seed=0)
    state, goal = env.state, env.goal
    for array in (observation, info["state"], env.state, env.goal):
        array += 1
    np.testing.assert_array_equal(env.state, state)
    np.testing.assert_array_equal(env.goal, goal)


def test_env_entry_takes_the_name_or_the_id():
    assert env_entry("tworoom") is env_entry("lewm/TwoRoom-v0")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(EnvError, match=r"Unknown environment 'tworooms'. Did you mean 'tworoom'\?"):
        make_env("tworooms")


@pytest.mark.parametrize("load", [make_env, lambda name: make_expert(name, stream(0))])
@pytest.mark.usefixtures("clean_registry")
def test_missing_simulator_names_the_extra(load):
    nowhere = "no_such_simulator.env:Env"
    register_env(entry_with(entry_point=nowhere, expert=nowhere, extra="mujoco"))
    with pytest.raises(EnvError, match=r"needs the package 'no_such_simulator'.*pip install 'lewm\[mujoco\]'"):
        load("other")


@pytest.mark.usefixtures("clean_registry")
def test_name_or_id_can_be_registered_only_once():
    register_env(env_entry("tworoom"))  # the same again changes nothing
    for taken in (entry_with(name="tworoom"), entry_with(gym_id="lewm/TwoRoom-v0")):
        with pytest.raises(EnvError, match="registered already"):
            register_env(taken)
    assert "lewm/Other-v0" not in gymnasium.registry


def test_registering_imports_neither_torch_nor_an_environment():
    code = "import sys, lewm.envs; print(*(m for m in ('torch', 'lewm.envs.tworoom') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@ALL_ENVS
def test_an_intervention_shows_at_its_step_and_not_before(name):
    env = make_env(name, resolution=56)
    first = env.objects[0]
    env.reset(seed=3)
    action = np.zeros(env.action_space.shape)
    env.schedule(Intervention(step=2, object=first, colour=(0, 0, 255)))
    env.step(action)
    before, before_state = env.render(), env.state
    env.step(action)
    painted, painted_state = env.render(), env.state
    env.reset(seed=3)
    own_before, own_painted = env.render_states(np.stack([before_state, painted_state]))
    assert np.array_equal(before, own_before), "nothing shows before its step, nor after the next reset"
    assert (painted != own_painted).any(), "the colour must show"


@ALL_ENVS
def test_interventions_name_what_does_not_exist(name):
    env = make_env(name, resolution=28)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="Unknown object"):
        env.schedule(Intervention(step=1, object="nothing", colour=(0, 0, 0)))
    with pytest.raises(EnvError, match="colour is three numbers"):
        env.paint(env.objects[0], (0, 0, 256))
    with pytest.raises(EnvError):
        env.teleport(env.objects[0], (1.0,) * 40)


def test_an_intervention_is_checked_when_made():
    with pytest.raises(EnvError, match="at least one action"):
        Intervention(step=0, object="agent", colour=(0, 0, 0))
    with pytest.raises(EnvError, match="colour, its position"):
        Intervention(step=1, object="agent")


def test_teleport_happens_after_the_action_of_its_step():
    env = make_env("tworoom")
    env.reset(options={"state": (50.0, 50.0), "goal": (180.0, 180.0)})
    env.schedule(Intervention(step=2, object="agent", position=(180.0, 180.0)))
    right = np.array([1.0, 0.0])
    *_, ended, _, info = env.step(right)
    assert info["state"].tolist() == [55.0, 50.0]
    assert not ended
    *_, ended, _, info = env.step(right)
    assert info["state"].tolist() == [180.0, 180.0]
    assert ended, "success is judged where the object is now"
