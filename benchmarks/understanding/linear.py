"""What can be read off an embedding by a linear map? A search follows distances, and these follow what is linear.

    python benchmarks/understanding/linear.py --model pretrained/tworoom --env tworoom [--numbers agent_x agent_y]

Frames of held-out expert episodes; ridge regression from their embeddings to numbers of the state, fitted to three
fifths of the episodes, its penalty chosen on a fifth. The table has, for the last fifth, the share of each number's
variance that is explained and the median error in the state's units. An encoder can know where things are and still
have folded that up: then little is explained here, and a goal that is not near already gives a search nothing to go by.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import tyro
from noticed import embed, held_out_states

from lewm.envs.registry import make_env
from lewm.methods.lewm import LeWM
from lewm.types import Array

PENALTIES = (1.0, 10.0, 100.0, 1000.0, 10_000.0)


def with_one(z_ND: Array) -> Array:
    """Embeddings (N, D) -> (N, D + 1): what is linear in these has an offset."""
    return np.concatenate([z_ND, np.ones((len(z_ND), 1))], axis=1)


def fit(z_ND: Array, numbers_NM: Array, penalty: float) -> Array:
    """The map (D + 1, M) of least squares, its size penalised."""
    design = with_one(z_ND)
    return np.linalg.solve(design.T @ design + penalty * np.eye(design.shape[1]), design.T @ numbers_NM)


def read_off(z_EFD: Array, numbers_EFM: Array) -> tuple[Array, Array]:
    """Share of variance explained (M,) and median error (M,) in the last fifth of the episodes."""
    first, second = 3 * len(z_EFD) // 5, 4 * len(z_EFD) // 5
    parts = slice(0, first), slice(first, second), slice(second, None)
    z, numbers = ([x[part].reshape(-1, x.shape[-1]) for part in parts] for x in (z_EFD, numbers_EFM))
    scale = numbers[0].std(0)

    def validation_error(penalty: float) -> float:
        errors = with_one(z[1]) @ fit(z[0], numbers[0], penalty) - numbers[1]
        return float(np.square(errors / scale).mean())

    best = fit(z[0], numbers[0], min(PENALTIES, key=validation_error))
    errors = with_one(z[2]) @ best - numbers[2]
    return 1 - np.square(errors).mean(0) / numbers[2].var(0), np.median(np.abs(errors), axis=0)


def main(model: Path, env: str, numbers: tuple[str, ...] = (), episodes: int = 40, frames: int = 40) -> None:
    """Print a table with one row per number of the state that varies. numbers: their names; by default all."""
    if episodes < 5:
        raise SystemExit(f"Episodes are split in fifths: expected 5 or more, got {episodes}.")
    world_model = LeWM.from_pretrained(model)
    world = make_env(env, world_model.image_size)
    if unknown := set(numbers) - set(world.state_names):
        raise SystemExit(f"{env}'s state has no {', '.join(sorted(unknown))}. Known: {', '.join(world.state_names)}.")
    states = held_out_states(env, world, episodes, frames)
    wanted = numbers or tuple(name for name, std in zip(world.state_names, states.std((0, 1)), strict=True) if std > 0)
    z_EFD = embed(world_model, world, states).cpu().double().numpy()
    chosen = states[..., [world.state_names.index(name) for name in wanted]]
    print(f"{env}, {episodes} episodes of {frames} frames")
    print(f"{'number':24s}{'explained':>10s}{'error':>10s}{'spread':>10s}")
    for row in zip(wanted, *read_off(z_EFD, chosen), chosen.std((0, 1)), strict=True):
        print("{:24s}{:10.1%}{:10.4f}{:10.4f}".format(*row))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    tyro.cli(main)
