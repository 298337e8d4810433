"""What the plans of an evaluation imagined, drawn by a decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lewm.config import PlanConfig
from lewm.envs.registry import make_env
from lewm.evaluate.animation import Imagined
from lewm.model.decoder import Decoder
from lewm.plan.schedule import next_turn
from lewm.types import Array, EpisodeResult


@dataclass(frozen=True)
class _Made:
    """A plan's raw actions, (H * K, action_dim), and those that had been executed when it was made, (step, ...)."""

    done: Array
    actions: Array


@torch.no_grad()
def imagined_plans(
    model: Any, decoder: Decoder, env_name: str, settings: PlanConfig, results: Sequence[EpisodeResult]
) -> list[list[Imagined]]:
    """What each plan of each episode imagined, from the frames that the model had seen when it was made.

    model: plans and imagines, as ``decoder`` knows its embeddings.  settings: it planned with.
    """
    with contextlib.closing(make_env(env_name, model.image_size)) as env:
        bounds = env.action_space.low, env.action_space.high
        made = [_plans(model, settings, result, bounds) for result in results]
        pairs = zip(results, made, strict=True)
        return [
            [_drawn(model, decoder, env.render_states, each, result.states) for each in plans]
            for result, plans in pairs
        ]


def _plans(model: Any, settings: PlanConfig, result: EpisodeResult, bounds: tuple[Array, Array]) -> list[_Made]:
    """When each plan of an episode was made, and what had been done before: worlds clip what they are told to do."""
    skip, done, made = model.frame_skip, np.zeros((0, model.action_dim), np.float32), list[_Made]()
    for plan in result.plans:
        made.append(_Made(done, plan.actions))
        executed = next_turn(settings, len(done) // skip).execute * skip
        done = np.concatenate([done, np.clip(plan.actions[:executed], *bounds)])
    return made


def _drawn(model: Any, decoder: Decoder, render: Callable[[Array], Array], made: _Made, states: Array) -> Imagined:
    """One plan, imagined again: from the last frames that were seen at the ends of blocks."""
    skip, step = model.frame_skip, len(made.done)
    count = min(model.history, step // skip + 1)
    seen = torch.from_numpy(render(states[step - (count - 1) * skip : step + 1 : skip])).to(model.device)
    past = _blocks(model, made.done[step - (count - 1) * skip :])
    z_TD = model.encode(seen)
    ahead_HD = model.rollout(z_TD[None], past[None], _blocks(model, made.actions)[None, None])[0, 0]
    frames = decoder.frames(torch.cat([z_TD[-1:], ahead_HD])).cpu().numpy()
    return Imagined(step, skip, frames)


def _blocks(model: Any, actions: Array) -> torch.Tensor:
    """Raw actions (n * K, action_dim) -> z-scored blocks (n, A)."""
    raw = torch.from_numpy(np.ascontiguousarray(actions, np.float32)).to(model.device)
    blocks: torch.Tensor = model.normalise_actions(raw.view(-1, model.frame_skip, model.action_dim))
    return blocks
