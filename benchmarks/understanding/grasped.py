"""Does a model of Cube know that a gripper grasps only what is between its fingers?

    python benchmarks/understanding/grasped.py --model pretrained/cube [--episodes 24] [--away 0 0.03 0.06 0.1]

In held-out expert episodes, at the moment before the gripper closes around the cube, the cube is put so far away (in m,
in a random direction). Then the gripper is closed and lifted. What the model imagines for the end is compared with two
pictures of the arm at the real end: with the cube in the gripper, and with the cube where it was put. The table has the
share of episodes in which the cube really came along, that in which what is imagined is nearer to the first picture,
and that in which the nearer picture is the right one. A model that takes closing for grasping has 100 % in the second
column, wherever the cube is, and its plans pick up what they do not touch.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from noticed import FIRST_EPISODE, embed

from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.envs.base import WorldEnv
from lewm.envs.cube import CUBE_POSITION, EFFECTOR_POSITION, GRIPPER_CLOSED
from lewm.envs.registry import make_env
from lewm.methods.lewm import LeWM
from lewm.rng import stream
from lewm.types import Array

BEGINS_TO_CLOSE = 0.1  # of GRIPPER_CLOSED
AROUND = 0.02  # m from the gripper's centre to a cube that it can close around
CLOSE, LIFT = np.array([0, 0, 0, 0, 1.0]), np.array([0, 0, 0.5, 0, 1.0])
ACTIONS = np.stack([CLOSE] * 10 + [LIFT] * 15).astype(np.float32)
CAME_ALONG = 0.03  # m that a lifted cube has risen


@dataclass(frozen=True)
class Attempt:
    """States (state_dim,): at the start, at the real end, and that with the cube in the gripper and left behind."""

    start: Array
    end: Array
    in_gripper: Array
    left_behind: Array

    @property
    def came_along(self) -> bool:
        return bool(self.end[CUBE_POSITION][2] - self.start[CUBE_POSITION][2] > CAME_ALONG)


def moments_before_grasps(env: WorldEnv, count: int) -> list[Array]:
    """States (state_dim,) of held-out episodes, one of each, with the open gripper around a cube on the floor."""
    found: list[Array] = []
    for index in range(FIRST_EPISODE, FIRST_EPISODE + 10 * count):
        states = generate_episode("cube", env.resolution, HELD_OUT_SEED, index, draw=False, env=env)["state"]
        around = np.linalg.norm(states[:, EFFECTOR_POSITION] - states[:, CUBE_POSITION], axis=1) < AROUND
        open_ = states[:, GRIPPER_CLOSED] < BEGINS_TO_CLOSE
        rows = np.flatnonzero(around[:-1] & open_[:-1] & ~open_[1:])
        if len(rows):
            found.append(states[rows[0]])
        if len(found) == count:
            return found
    raise SystemExit(f"Only {len(found)} of {10 * count} episodes have a grasp.")


def attempt(env: WorldEnv, state: Array, angle: float, away: float) -> Attempt:
    """Close and lift, with the cube of ``state`` (state_dim,) moved along the floor."""
    start = state.copy()
    start[CUBE_POSITION][:2] += away * np.array([math.cos(angle), math.sin(angle)])
    env.reset(options={"state": start, "goal": start})
    for action in ACTIONS:
        env.step(action)
    end = env.state.copy()
    in_gripper, left_behind = end.copy(), end.copy()
    in_gripper[CUBE_POSITION] = end[EFFECTOR_POSITION] + state[CUBE_POSITION] - state[EFFECTOR_POSITION]
    left_behind[CUBE_POSITION] = start[CUBE_POSITION]
    return Attempt(start, end, in_gripper, left_behind)


@torch.inference_mode()
def imagined_along(model: LeWM, env: WorldEnv, attempts: list[Attempt]) -> Array:
    """Of each attempt (N,): whether the imagined end is nearer to the cube in the gripper than to one left behind."""
    states = [[each.start for each in attempts], [each.in_gripper for each in attempts]]
    states.append([each.left_behind for each in attempts])
    start_ND, in_gripper_ND, left_behind_ND = embed(model, env, np.array(states))
    raw = torch.from_numpy(ACTIONS).to(model.device).unflatten(0, (-1, model.frame_skip))
    plan_NHA = model.normalise_actions(raw.expand(len(attempts), *raw.shape))
    rollout = model.planning_rollout("float32", differentiable=False)
    end_ND = rollout(start_ND.unsqueeze(1), plan_NHA[:, :0], plan_NHA.unsqueeze(1))[:, 0, -1]
    nearer_N = (end_ND - in_gripper_ND).square().sum(-1) < (end_ND - left_behind_ND).square().sum(-1)
    return nearer_N.cpu().numpy()


def main(model: Path, episodes: int = 24, away: tuple[float, ...] = (0.0, 0.03, 0.06, 0.1)) -> None:
    """Print a table with one row per distance of the cube, in m."""
    if episodes < 1 or not away:
        raise SystemExit(f"It takes an episode and a distance, got {episodes} and {away}.")
    world_model = LeWM.from_pretrained(model)
    actions, numbers = ACTIONS.shape
    if world_model.action_dim != numbers or actions % world_model.frame_skip:
        blocks = f"blocks of {world_model.frame_skip} actions of {world_model.action_dim} numbers"
        raise SystemExit(f"{model} has {blocks}; Cube's have {numbers}, and {actions} of them must make whole blocks.")
    with contextlib.closing(make_env("cube", resolution=world_model.image_size, obs_type="state")) as env:
        moments = moments_before_grasps(env, episodes)
        angles = stream(HELD_OUT_SEED).uniform(0, 2 * math.pi, episodes)
        print(f"{'cube away':>10s}{'came along':>12s}{'imagined so':>13s}{'right':>8s}   of {episodes}")
        for distance in away:
            attempts = [attempt(env, *both, distance) for both in zip(moments, angles, strict=True)]
            really = np.array([each.came_along for each in attempts])
            along = imagined_along(world_model, env, attempts)
            print(f"{distance:10g}{really.mean():12.0%}{along.mean():13.0%}{(along == really).mean():8.0%}")


if __name__ == "__main__":
    tyro.cli(main)
