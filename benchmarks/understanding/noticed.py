"""Does a model see the objects? How far its embedding moves when nothing but one object does.

    python benchmarks/understanding/noticed.py --model pretrained/tworoom --env tworoom

Frames of held-out expert episodes are drawn again with one object moved towards the middle of where it is found. The
table has the squared distance between both embeddings, in parts of the mean one between frames of different episodes:
the median over frames, and the share of frames in which it is below 0.01. An object that is hardly noticed cannot be
planned with, however well the model predicts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import tyro

from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.envs.base import WorldEnv
from lewm.envs.registry import make_env
from lewm.methods.lewm import LeWM
from lewm.types import Array

FIRST_EPISODE = 50_000  # held-out, and no pair's
# Where the position of each object is in the state, and two distances to move it by, in the state's units.
OBJECTS = {
    "tworoom": {"agent": (slice(0, 2), (5.0, 20.0))},
    "pusht": {"agent": (slice(0, 2), (10.0, 40.0)), "block": (slice(2, 4), (10.0, 40.0))},
    "cube": {"cube": (slice(14, 16), (0.02, 0.10))},
}


def held_out_states(name: str, env: WorldEnv, episodes: int, frames: int) -> Array:
    """States (episodes, frames, state_dim), evenly spaced over each episode."""
    chosen = []
    for index in range(FIRST_EPISODE, FIRST_EPISODE + episodes):
        states = generate_episode(name, env.resolution, HELD_OUT_SEED, index, draw=False, env=env)["state"]
        chosen.append(states[np.linspace(0, len(states) - 1, frames).astype(int)])
    return np.stack(chosen)


@torch.inference_mode()
def embed(model: LeWM, env: WorldEnv, states: Array) -> torch.Tensor:
    """Embeddings (E, F, D) of states (E, F, state_dim)."""
    frames = (torch.from_numpy(env.render_states(episode)).to(model.device) for episode in states)
    return torch.stack([model.encode(episode) for episode in frames])


def moved(states: Array, place: slice, distance: float) -> Array:
    """States with the position in ``place`` so far nearer to the mean of all of them, or beyond it."""
    position = states[..., place]
    way = position.mean((0, 1)) - position
    result = states.copy()
    result[..., place] += distance * way / np.linalg.norm(way, axis=-1, keepdims=True)
    return result


def main(model: Path, env: str, episodes: int = 16, frames: int = 10) -> None:
    """Print a table with one row per object and distance."""
    if env not in OBJECTS:
        raise SystemExit(f"{env} has no objects to move. Known: {', '.join(OBJECTS)}.")
    if episodes < 2:
        raise SystemExit(f"It takes frames of different episodes to compare with: expected 2 or more, got {episodes}.")
    world_model = LeWM.from_pretrained(model)
    world = make_env(env, world_model.image_size)
    states = held_out_states(env, world, episodes, frames)
    z_EFD = embed(world_model, world, states)
    pairs = (z_EFD[:, None, :, None] - z_EFD[None, :, None]).square().sum(-1).mean((2, 3))  # of episodes
    between = pairs[~torch.eye(episodes, dtype=torch.bool, device=pairs.device)].mean()
    print(f"{env}, {episodes} episodes of {frames} frames; frames of different episodes are {between:.0f} apart")
    print(f"{'object':10s}{'moved by':>10s}{'median':>10s}{'below 0.01':>12s}")
    for name, (place, distances) in OBJECTS[env].items():
        for distance in distances:
            change = (embed(world_model, world, moved(states, place, distance)) - z_EFD).square().sum(-1) / between
            print(f"{name:10s}{distance:10g}{change.median():10.4f}{100 * (change < 0.01).float().mean():11.0f}%")


if __name__ == "__main__":
    tyro.cli(main)
