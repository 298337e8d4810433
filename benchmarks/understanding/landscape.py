"""How far a model's latent distance tells near from far: the search for a plan is blind beyond that.

    python benchmarks/understanding/landscape.py --model pretrained/reacher --env reacher [--episodes 16]

Prints the mean squared distance between embeddings of frames that are some action blocks apart in an expert's episode,
in parts of that between frames of different episodes, with the share of pairs that are farther apart than those. A
distance that soon comes to 1 says nothing about the way to a goal farther away.
"""

from __future__ import annotations

from pathlib import Path

import torch
import tyro

from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.methods.lewm import LeWM

BLOCKS = (1, 2, 3, 4, 5, 7, 10)
FRAMES = 16  # of each episode


@torch.inference_mode()
def embeddings(model: LeWM, env: str, episodes: int) -> torch.Tensor:
    """Of frames one action block apart, (E, FRAMES, D); episodes that are too short are passed over."""
    found: list[torch.Tensor] = []
    index = 0
    while len(found) < episodes:
        pixels = generate_episode(env, model.image_size, HELD_OUT_SEED, index, frame_stride=model.frame_skip)["pixels"]
        index += 1
        if len(pixels) >= FRAMES:
            found.append(model.encode(torch.from_numpy(pixels[:FRAMES]).to(model.device)).cpu())
    return torch.stack(found)


def main(model: Path, env: str, episodes: int = 16) -> None:
    """Print a row per number of blocks."""
    z_ETD = embeddings(LeWM.from_pretrained(model), env, episodes)
    apart = torch.cat([(z_ETD[i] - z_ETD[j]).square().sum(-1) for i in range(episodes) for j in range(i)])
    print(f"{env}: {episodes} episodes; frames of different ones are {apart.mean():.0f} apart (squared)")
    print(f"{'blocks':>6} {'distance':>9} {'farther':>8}")
    for blocks in BLOCKS:
        distance = (z_ETD[:, blocks:] - z_ETD[:, :-blocks]).square().sum(-1)
        print(f"{blocks:6d} {distance.mean() / apart.mean():9.2f} {(distance > apart.mean()).float().mean():8.0%}")


if __name__ == "__main__":
    tyro.cli(main)
