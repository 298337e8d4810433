"""How long DINO-WM's search imagines, beside the predictor's own layers, and its plans beside LeWM's, in one run.

    python benchmarks/token_plans.py [--features 112 384] [--context 1 3] [--cells 4 8] [--json FILE]

A search is 30 times the futures of 300 candidates over five blocks, of 196 tokens a frame. Tokens of 112 numbers are
EfficientNet-Lite0's, of 384 DINOv2-S's. Weights and frames are random. On CUDA, futures are captured as a search
captures them. The plain layers are what runs where lewm has no kernels.

Then whole plans of one environment from one frame, by LeWM in full size and by DINO-WM, taking turns: medians, and
their ratio. There its tokens are pixels, 3 x cells x cells numbers each: what a frozen encoder takes comes on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lewm import Planner
from lewm.config import PlanConfig, PredictorConfig
from lewm.methods.dino_wm import DinoWMConfig
from lewm.model.token_predictor import TokenPredictor
from lewm.model.token_rollout import TokenRollout
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts

ITERATIONS, HORIZON, BLOCK = 30, 5, 10


def seconds_of_a_search(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Mean of some calls after one that is not counted, times the iterations of a search."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - started) / repeats * ITERATIONS


def captured(call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], Any]:
    """The call as a CUDA graph, on CUDA."""
    if device.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def row(features: int, context: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a search, with the layers for planning and with the plain ones, and how far their distances differ."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    predictor = TokenPredictor(3, arguments.tokens, features, BLOCK, 10, PredictorConfig()).to(device).eval()
    size = arguments.tokens * features
    shapes = (1, context, size), (1, context - 1, BLOCK), (1, arguments.samples, HORIZON, BLOCK), (1, size)
    asked = [torch.randn(shape, device=device) for shape in shapes]
    fast, plain = TokenRollout(predictor), TokenRollout(predictor, plain=True)
    expected = plain.distances(*asked)
    found: dict[str, float] = {"features": features, "context": context}
    found["difference"] = float((fast.distances(*asked) - expected).abs().max() / expected.abs().max())
    for name, rollout in (("seconds", fast), ("plain_seconds", plain)):
        call = captured(lambda rollout=rollout: rollout.distances(*asked), device)  # type: ignore[misc]
        found[name] = seconds_of_a_search(call, device, arguments.repeats)
    return found


def whole_plans(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Median seconds of ``Planner.plan`` for LeWM and for DINO-WM, by numbers of a token, and ratios to LeWM's."""
    facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)))
    side = arguments.side
    frame, goal = torch.randint(256, (2, side, side, 3), dtype=torch.uint8).numpy()
    settings = {"lewm": preset(arguments.preset).method}
    for cells in arguments.cells:
        patch = side // 14 if side >= 14 else side
        settings[f"dino_wm, {3 * cells**2} numbers"] = DinoWMConfig(None, side, patch, cells)
    config = PlanConfig(samples=arguments.samples, elites=min(30, arguments.samples), iterations=arguments.iterations)
    planners = {}
    for name, method in settings.items():
        model: Any = method.build(facts).to(arguments.device).eval()
        planners[name] = Planner(model, config=config)
    times: dict[str, list[float]] = {name: [] for name in planners}
    for _ in range(arguments.repeats + 1):  # they take turns; the first is not counted
        for name, planner in planners.items():
            started = time.perf_counter()
            planner.plan(frame, goal)
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return [{"name": name, "seconds": value, "ratio": value / medians["lewm"]} for name, value in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--features", type=int, nargs="+", default=[112, 384], help="numbers of a token")
    parser.add_argument("--context", type=int, nargs="+", default=[1, 3], help="real frames that a plan starts from")
    parser.add_argument("--tokens", type=int, default=196, help="of a frame")
    parser.add_argument("--samples", type=int, default=300, help="candidates")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cells", type=int, nargs="+", default=[4, 8], help="of a patch, for whole plans")
    parser.add_argument("--side", type=int, default=224, help="of frames, for whole plans")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of whole plans")
    parser.add_argument("--preset", default="pusht", help="whose LeWM the whole plans are compared with")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'numbers':>8} {'frames':>7} {'seconds':>8} {'plain':>8} {'difference':>11}")
    for features in arguments.features:
        for context in arguments.context:
            rows.append(found := row(features, context, arguments))
            line = "{features:>8} {context:>7} {seconds:>8.2f} {plain_seconds:>8.2f} {difference:>11.1e}"
            print(line.format(**found), flush=True)
    plans = whole_plans(arguments)
    for plan in plans:
        print("a plan, {name}: {seconds:.4f} s, {ratio:.1f} times LeWM's".format(**plan), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"searches": rows, "plans": plans}, indent=2) + "\n")


if __name__ == "__main__":
    main()
