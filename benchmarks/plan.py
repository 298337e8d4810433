"""Planning time: our CEM beside the public solver's, same weights, same inputs, one run.

    python benchmarks/plan.py [--device cuda] [--json FILE] [--curve MODEL --env ENV --pairs 50]

Prints milliseconds per plan of 300 candidates x 30 iterations x 5 blocks with the full-size network for 1, 10 and 50
environments, the ratio, and the share of the arithmetic limit that ours reaches; then the search alone, of whole plans
and for the schedule "soonest", and the latency of ``Planner.plan``, encoding included. On a CPU fewer iterations are
run and the time is scaled to 30; both solvers then get the same noise and must return the same plans. With a trained
model, also its success against planning time, for all solvers at several budgets (benchmarks/solvers.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import peer
import torch
from gymnasium.spaces import Box
from solvers import print_table, solver_rows

from lewm import LeWM, Planner
from lewm.config import PlanConfig, ScheduleName
from lewm.evaluate.manifest import load_manifest
from lewm.plan.inputs import Encoded, Request
from lewm.plan.solver import Problem
from lewm.types import ActionStats, Context

PAPER = PlanConfig()  # 300 candidates, 30 iterations, 5 blocks
SKIP, ACTION_DIM = 5, 2
Precision = Literal["bf16", "float32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SEARCHED: tuple[ScheduleName, ...] = ("whole", "soonest")  # the others search as "whole" does
# Multiplications and additions of a plan from one frame, as the GPU kernels arrange them, and as FastRollout does.
FLOPS_PER_PLAN = {"cuda": 1.63e12, "cpu": 1.42e12}


def inputs(environments: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random frames and goals, uint8 (B, 224, 224, 3) each."""
    rng = np.random.default_rng(seed)
    shape = (environments, 224, 224, 3)
    return rng.integers(0, 256, shape, np.uint8), rng.integers(0, 256, shape, np.uint8)


def public_info(frames: np.ndarray, goals: np.ndarray, device: str) -> dict[str, torch.Tensor]:
    """The public solver's input: normalised float frames (B, 1, 3, 224, 224)."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def prepare(images: np.ndarray) -> torch.Tensor:
        x = (torch.from_numpy(images).float() / 255 - mean) / std
        return x.permute(0, 3, 1, 2).unsqueeze(1).to(device)

    action = torch.zeros(len(frames), 1, SKIP * ACTION_DIM, device=device)
    return {"pixels": prepare(frames), "goal": prepare(goals), "action": action}


def time_it(repeats: int, device: str, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each of several calls, after one that is not counted.

    They take turns, so that whatever else the machine does slows all of them down.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, times in zip(calls, seconds, strict=True):
            times.append(timed(call, device))
    return [statistics.median(times[1:]) for times in seconds]


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def public_solver(network: torch.nn.Module, environments: int, iterations: int, device: str) -> Any:
    solver = peer.load("solver.cem").CEMSolver(
        network, batch_size=1, num_samples=PAPER.samples, n_steps=iterations, topk=PAPER.elites, device=device
    )
    space = Box(-1, 1, (environments, ACTION_DIM))
    solver.configure(
        action_space=space, n_envs=environments, config=SimpleNamespace(horizon=PAPER.horizon, action_block=SKIP)
    )
    return solver


def compare(network: torch.nn.Module, model: LeWM, environments: int, device: str) -> dict[str, float]:
    """One row of the table: milliseconds per round of plans, ours and theirs."""
    frames, goals = inputs(environments)
    on_cpu = device == "cpu"
    iterations = min(10 if environments == 1 else 2, PAPER.iterations) if on_cpu else PAPER.iterations
    planner = Planner(model, config=replace(PAPER, iterations=iterations))
    nothing_done = np.zeros((0, 0, 0))
    requests = [Request(Context(frames[i, None], nothing_done), goals[i], key=i) for i in range(environments)]
    info = public_info(frames, goals, device)
    with quiet():
        public = public_solver(network, environments, iterations, device)
        repeats = 3 if environments == 1 else 1
        ours, theirs = time_it(repeats, device, lambda: planner.plan_many(requests), lambda: public.solve(dict(info)))
        if not on_cpu:  # nothing else uses the device, and one call is soon over
            (ours,) = time_it(20, device, lambda: planner.plan_many(requests))
    scale = PAPER.iterations / iterations * 1000
    return {
        "environments": environments,
        "ours_ms": ours * scale,
        "public_ms": theirs * scale,
        "ratio": theirs / ours,
        "tflops": environments * FLOPS_PER_PLAN[device] * iterations / PAPER.iterations / ours / 1e12,
    }


def quiet() -> Any:
    """The public solver prints its time at every call."""
    return contextlib.redirect_stdout(io.StringIO())


def same_result(network: torch.nn.Module, model: LeWM) -> float:
    """Largest difference between our plan and theirs when both draw the same noise (one environment, CPU)."""
    frames, goals = inputs(1)
    planner = Planner(model, config=replace(PAPER, iterations=3))
    solver_module: Any = peer.load("solver.cem")
    key = torch.tensor([7])
    problem = Problem(lambda plans: plans.sum((2, 3)), PAPER.horizon, SKIP * ACTION_DIM, key)
    draws = iter(problem.noise(PAPER.samples, torch.tensor(i)) for i in range(3))

    class OurNoise:
        """torch, but for randn."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def randn(self, *_: Any, **__: Any) -> torch.Tensor:
            return next(draws)

    solver_module.torch = OurNoise()
    try:
        with quiet():
            theirs = public_solver(network, 1, 3, "cpu").solve(public_info(frames, goals, "cpu"))["actions"]
    finally:
        solver_module.torch = torch
    plan = planner.plan_many([Request(Context(frames, np.zeros((0, 0, 0))), goals[0], 7)])[0]
    ours = planner.inputs.normalised(plan.actions.reshape(PAPER.horizon, SKIP, ACTION_DIM))
    return (ours - theirs[0]).abs().max().item()


def latency(model: LeWM, device: str, repeats: int = 200) -> dict[str, float]:
    """p50 and p99 of warm calls of ``Planner.plan`` with changing frames, encoding and copies included."""
    planner = Planner(model, config=PAPER)
    frames, goals = inputs(8)
    calls = iter(range(10**9))
    seconds = [timed(lambda: planner.plan(frames[next(calls) % 8], goals[0]), device) for _ in range(repeats + 1)][1:]
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000
    return {"p50_ms": p50, "p99_ms": p99, "p99/p50": p99 / p50}


def search_only(model: LeWM, environments: int, precision: Precision, schedule: ScheduleName) -> float:
    """Milliseconds of the search itself: no pixels; on CUDA a captured graph."""
    planner = Planner(model, config=replace(PAPER, precision=precision, schedule=schedule))
    searches = environments * (PAPER.horizon if schedule == "soonest" else 1)
    device = model.device
    z = torch.randn(environments, 1, 192, device=device)
    start = torch.zeros(searches, PAPER.horizon, SKIP * ACTION_DIM, device=device)
    encoded = Encoded(z, z.new_zeros(environments, 0, 10), z[:, 0] + 1, torch.arange(searches, device=device), start)
    repeats = 30 if device.type == "cuda" else 2
    return time_it(repeats, device.type, lambda: planner.search.run(encoded))[0] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--curve", type=Path, help="a trained model's folder: success against planning time")
    parser.add_argument("--env", default="tworoom", help="the environment of that model")
    parser.add_argument("--pairs", type=int, default=50, help="episodes per point of the curve")
    args = parser.parse_args()
    network = peer.build_network()
    with tempfile.TemporaryDirectory() as folder:
        model = peer.as_ours(network, Path(folder), ActionStats((0.0,) * ACTION_DIM, (1.0,) * ACTION_DIM))
    results: dict[str, Any] = {"device": args.device, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if args.device == "cuda":
        results["device"] = torch.cuda.get_device_name()
    else:
        results["largest_difference_of_plans"] = same_result(network, model)
        print(f"same noise, same plan: largest difference {results['largest_difference_of_plans']:.1e}")
    network, model = network.to(args.device), model.to(args.device)
    print(f"CEM {PAPER.samples} x {PAPER.iterations} x {PAPER.horizon}, {results['device']}, torch {torch.__version__}")
    print(f"{'environments':>12} {'ours ms':>10} {'public ms':>10} {'ratio':>7} {'TFLOP/s':>8}", flush=True)
    results["rows"] = []
    for environments in args.environments:
        row = compare(network, model, environments, args.device)
        results["rows"].append(row)
        print(
            "{environments:>12} {ours_ms:>10.1f} {public_ms:>10.1f} {ratio:>7.1f} {tflops:>8.1f}".format(**row),
            flush=True,
        )
    # A CPU takes as long for each environment as for one.
    environments = args.environments if args.device == "cuda" else [1]
    for precision, schedule in itertools.product(PRECISIONS, SEARCHED):
        times = {b: search_only(model, b, precision, schedule) for b in environments}
        results[f"search_only_{schedule}_{precision}_ms"] = times
        listed = ", ".join(f"{b}: {ms:.1f} ms" for b, ms in times.items())
        print(f"search alone, {schedule}, {precision}: {listed}", flush=True)
    results["latency"] = latency(model, args.device, 200 if args.device == "cuda" else 3)
    print("Planner.plan: " + ", ".join(f"{name} {value:.2f}" for name, value in results["latency"].items()))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.curve:
        trained, specs = LeWM.from_pretrained(args.curve, args.device), load_manifest(args.env).first(args.pairs)
        print_table(f"{args.env}, {args.pairs} pairs", solver_rows(trained, args.env, specs))


if __name__ == "__main__":
    main()
