"""Frames of fixed states: how fast they are drawn here, and how much they differ from those of another machine.

    python benchmarks/render.py --out mesa.npz           # on one machine
    python benchmarks/render.py --compare mesa.npz       # on another: draws the states of that file

States are taken evenly from episodes of the environment's expert. Frames per second: one process, the fastest of three
passes over all states, without the making of the renderer.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import numpy as np

from lewm.envs import env_names, make_env, make_expert
from lewm.errors import EnvError
from lewm.rng import stream

EPISODE_STEPS, STATES_PER_EPISODE, PASSES = 200, 16, 3


def fixed_states(name: str, count: int) -> np.ndarray:
    """``count`` states (N, state_dim) that the expert comes through, 16 of each episode."""
    states: list[np.ndarray] = []
    with contextlib.closing(make_env(name)) as env:
        while len(states) < count:
            seed = len(states) // STATES_PER_EPISODE
            env.reset(seed=seed)
            expert = make_expert(name, stream(seed))
            for step in range(EPISODE_STEPS):
                if step % (EPISODE_STEPS // STATES_PER_EPISODE) == 0:
                    states.append(env.state)
                env.step(expert.act(env.state, env.goal))
    return np.stack(states[:count])


def draw(name: str, states: np.ndarray, resolution: int) -> tuple[np.ndarray, float]:
    """Frames (N, R, R, 3) of ``states``, and frames per second."""
    with contextlib.closing(make_env(name, resolution=resolution)) as env:
        frames, seconds = env.render_states(states[:1]), []
        for _ in range(PASSES):
            begin = time.perf_counter()
            frames = env.render_states(states)
            seconds.append(time.perf_counter() - begin)
    return frames, len(states) / min(seconds)


def main() -> None:
    """Draw, print a line per environment, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["reacher", "cube"], choices=env_names())
    parser.add_argument("--frames", type=int, default=128, help="states of each environment")
    parser.add_argument("--resolution", type=int, default=224)
    parser.add_argument("--out", type=Path, help="write states and frames to this .npz")
    parser.add_argument("--compare", type=Path, help="an .npz that --out wrote: draw its states, print the differences")
    arguments = parser.parse_args()
    other = np.load(arguments.compare) if arguments.compare else {}
    written: dict[str, np.ndarray] = {}
    for name in arguments.env:
        if arguments.compare and f"{name}_states" not in other:
            raise SystemExit(f"{arguments.compare} has no frames of {name}; choose others with --env.")
        states = other[f"{name}_states"] if arguments.compare else fixed_states(name, arguments.frames)
        resolution = other[f"{name}_frames"].shape[1] if arguments.compare else arguments.resolution
        try:
            frames, speed = draw(name, states, resolution)
        except EnvError as error:
            raise SystemExit(str(error)) from error
        line = f"{name:10} {len(states)} frames of {resolution} px: {speed:6.1f} frames/s"
        if arguments.compare:
            difference = np.abs(frames.astype(int) - other[f"{name}_frames"])
            line += f"; differences: mean {difference.mean():.4f}, max {difference.max()}"
            line += f", pixels off by more than 16: {(difference.max(axis=-1) > 16).mean():.3%}"
        print(line, flush=True)
        written |= {f"{name}_states": states, f"{name}_frames": frames}
    if arguments.out:
        np.savez_compressed(arguments.out, allow_pickle=False, **written)


if __name__ == "__main__":
    main()
