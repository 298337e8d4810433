"""How far imagined futures are from what happens, for random plans of several kinds.

    python benchmarks/understanding/imagination.py --model pretrained/reacher --env reacher [--plans 128] [--blocks 5]

Plans begin at the starts of the environment's frozen pairs; each is imagined by the model and executed by the
environment, which clips actions to its bounds. Plans are Gaussian in z-scored actions, as a solver's first candidates
are: white or smooth in time (iCEM's exponent), and with actions as they come or within ±1. Printed are squared
distances between the imagined and the real embedding of the last frame, and the share of plans whose imagined end is
nearer to another plan's real end than to their own: those a planner would mistake for something else.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch
import tyro

from lewm.envs.base import WorldEnv
from lewm.envs.registry import make_env
from lewm.evaluate.manifest import load_manifest
from lewm.methods.lewm import LeWM
from lewm.plan.icem import colour, colouring_matrix
from lewm.types import Array, EpisodeSpec

EXPONENTS = (0.0, 0.5, 1.0, 2.0)
LIMITS = (None, 1.0)


def execute(env: WorldEnv, specs: tuple[EpisodeSpec, ...], actions_NTa: Array) -> tuple[Array, Array]:
    """Frames before and after plans of T raw actions, uint8 (N, R, R, 3) each."""
    starts, ends = [], []
    for spec, actions in zip(specs, actions_NTa, strict=True):
        env.reset(options={"state": np.asarray(spec.start), "goal": np.asarray(spec.goal)})
        starts.append(env.state)
        for action in actions:
            env.step(np.clip(action, -1, 1))
        ends.append(env.state)
    return env.render_states(np.stack(starts)), env.render_states(np.stack(ends))


@torch.inference_mode()
def errors(model: LeWM, env: WorldEnv, specs: tuple[EpisodeSpec, ...], plans_NHA: torch.Tensor) -> tuple[Array, Array]:
    """Of z-scored plans: squared distances from imagined to all real ends (N, N), and to their own (N,)."""
    raw = model.denormalise_actions(plans_NHA).flatten(1, 2).numpy()
    start, end = (torch.from_numpy(frames).to(model.device) for frames in execute(env, specs, raw))
    z_ND, real_ND = torch.cat([model.encode(start), model.encode(end)]).chunk(2)
    rollout = model.planning_rollout("float32", differentiable=False)
    plans_NHA = plans_NHA.to(model.device)
    imagined_ND = rollout(z_ND.unsqueeze(1), plans_NHA[:, :0], plans_NHA.unsqueeze(1))[:, 0, -1]
    distances_NN = torch.cdist(imagined_ND, real_ND).square().cpu()
    return distances_NN.numpy(), distances_NN.diagonal().numpy()


def main(model: Path, env: str, plans: int = 128, blocks: int = 5, seed: int = 0) -> None:
    """Print a row per kind of plan."""
    world_model = LeWM.from_pretrained(model)
    specs, skip = load_manifest(env).first(plans), world_model.frame_skip
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(1, plans, blocks, skip * world_model.action_dim, generator=generator)
    print(f"{env}: {plans} plans of {blocks} blocks")
    print(f"{'exponent':>8} {'limit':>6} {'median':>8} {'mean':>8} {'mistaken':>9}")
    with contextlib.closing(make_env(env, resolution=world_model.image_size, obs_type="state")) as world:
        for exponent in EXPONENTS:
            for limit in LIMITS:
                chosen = colour(white, colouring_matrix(blocks * skip, exponent))[0]
                if limit is not None:
                    raw = world_model.denormalise_actions(chosen).clamp(-limit, limit)
                    chosen = world_model.normalise_actions(raw)
                every, own = errors(world_model, world, specs, chosen)
                mistaken = np.mean(every.argmin(1) != np.arange(plans))
                row = f"{exponent:8g} {limit or 'none':>6} {np.median(own):8.2f} {own.mean():8.2f} {mistaken:8.1%}"
                print(row, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
