"""How long one step of a surprise monitor takes: one frame's embedding and one prediction, with cached context.

    OMP_NUM_THREADS=1 python benchmarks/monitor.py --models pretrained/tworoom pretrained/cube runs/demo/training

Rounds of all models alternate, and the best round's median counts: a machine that does other things beside only ever
slows one down. Processor time is that of the calling thread, which is all of it on one core of a CPU.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import torch
import tyro

import lewm
from lewm.understand.monitor import SurpriseMonitor

NEVER = 1e30  # a threshold that no error reaches


def milliseconds(monitor: SurpriseMonitor, size: int, action_dim: int, steps: int) -> tuple[float, float]:
    """Medians of wall-clock and of processor time of a step whose whole context is known."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (16, size, size, 3), np.uint8)
    action = np.zeros(action_dim, np.float32)
    monitor.reset()
    monitor.step(frames[0])
    times = list[tuple[float, float]]()
    while len(times) < steps:
        began = time.perf_counter(), time.thread_time()
        said = monitor.step(frames[len(times) % len(frames)], action)
        if said.score is not None:
            times.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
    wall, processor = np.median(times, axis=0)
    return 1e3 * float(wall), 1e3 * float(processor)


def main(
    models: tuple[str, ...],
    device: str = "cpu",
    rounds: int = 8,
    steps: int = 60,
    precision: Literal["auto", "float32", "bf16"] = "auto",
) -> None:
    """Print a line for each model: milliseconds a step."""
    torch.set_num_threads(1)
    loaded = {name: lewm.load(name, device) for name in models}
    monitors = {name: SurpriseMonitor(model, NEVER, precision=precision) for name, model in loaded.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in loaded.items():
            found[name].append(milliseconds(monitors[name], model.image_size, model.action_dim, steps))
    for name, times in found.items():
        wall, processor = np.min(times, axis=0)
        print(f"{name}: {wall:.2f} ms a step ({processor:.2f} ms of processor time)")


if __name__ == "__main__":
    tyro.cli(main)
