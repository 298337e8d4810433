"""One expert episode: a pure function of the arguments of ``generate_episode``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from lewm.data.formats.demonstrations import choose_demonstration
from lewm.envs.base import Expert, WorldEnv
from lewm.envs.exploration import WanderingExpert
from lewm.envs.registry import env_entry, make_env, make_expert, make_mistaken
from lewm.rng import derive_seed, stream
from lewm.types import Array, Demonstration

HELD_OUT_SEED = 20_260_101  # of the episodes that evaluation problems are cut from
DEMONSTRATION = "demonstration"  # the column of which one is replayed
_EXPERT, _PHASE, _DEMONSTRATION, _EXPLORATION, _MISTAKES = 1, 3, 4, 5, 6  # what an episode's random streams are for


def generate_episode(
    env_name: str,
    resolution: int,
    seed: int,
    index: int,
    frame_stride: int = 1,
    demonstrations: Sequence[Demonstration] | None = None,
    draw: bool = True,
    env: WorldEnv | None = None,
    exploration: float = 0.0,
    mistakes: float = 0.0,
) -> dict[str, Array]:
    """Episode ``index`` of a collection: it ends at the goal or after the environment's ``episode_steps``.

    With demonstrations it is a replay of one of them, of a held-out one if ``seed`` is ``HELD_OUT_SEED``. ``env``: the
    environment to use, if there is one that observes states; what happened in it before makes no difference.
    ``exploration``, ``mistakes``: the expert wanders off, or is mistaken, for up to this share of the time.

    Returns columns of L = steps + 1 rows: action float32 (L, action_dim), the last one NaN because none was taken
    there; state float64 (L, state_dim); proprio float32 (L, P), if the environment says what its agent senses; success
    uint8 (L,). A held-out replay has demonstration int32 (L,), the number of the one that it replays. And pixels uint8
    (F, R, R, 3) of the steps frame_step int64 (F,): all, or every ``frame_stride``th from a random one on. Neither if
    not ``draw``.
    """
    demonstration, chosen, held_out = None, 0, seed == HELD_OUT_SEED
    if demonstrations is not None:
        chosen = choose_demonstration(demonstrations, stream(seed, index, _DEMONSTRATION), held_out)
        demonstration = demonstrations[chosen]
    with contextlib.ExitStack() as stack:
        if env is None:
            env = stack.enter_context(contextlib.closing(make_env(env_name, resolution)))
        expert = make_expert(env_name, stream(seed, index, _EXPERT), demonstration)
        if mistakes:
            expert = make_mistaken(env_name, expert, stream(seed, index, _MISTAKES), mistakes)
        if exploration:
            expert = WanderingExpert(expert, stream(seed, index, _EXPLORATION), exploration)
        env.reset(seed=derive_seed(seed, index))
        start, goal = expert.begin(env.state, env.goal)
        env.reset(options={"state": start, "goal": goal})
        state, action = _run_episode(env, expert, env_entry(env_name).episode_steps)
        sensed = {"proprio": env.proprio(state).astype(np.float32)} if env.proprio_names else {}
        success = env.is_success(state, env.goal).astype(np.uint8)
        columns = {"action": action, **sensed, "state": state, "success": success}
        if demonstration is not None and held_out:  # not of training data: the same settings make the files they did
            columns[DEMONSTRATION] = np.full(len(state), chosen, np.int32)
        if not draw:
            return columns
        phase = int(stream(seed, index, _PHASE).integers(frame_stride))
        frame_step = np.arange(phase, len(state), frame_stride)
        return {"pixels": env.render_states(state[frame_step]), "frame_step": frame_step, **columns}


def _run_episode(env: WorldEnv, expert: Expert, episode_steps: int) -> tuple[Array, Array]:
    """States float64 (L, state_dim) and actions float32 (L, action_dim) until the expert is done."""
    states, actions = [env.state.copy()], []
    for _ in range(expert.steps or episode_steps):
        # Rounded before it is executed: replaying the recorded action gives the recorded state.
        action = np.asarray(expert.act(env.state, env.goal), np.float32)
        _, _, terminated, truncated, _ = env.step(action)
        actions.append(action)
        states.append(env.state.copy())
        if (terminated or truncated) and expert.steps is None:
            break
    return np.stack(states).astype(np.float64), np.stack([*actions, np.full_like(actions[0], np.nan)])
