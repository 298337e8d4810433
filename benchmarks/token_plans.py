"""How long DINO-WM's search imagines, beside the same with the predictor's own layers, in one run.

    python benchmarks/token_plans.py [--features 112 384] [--context 1 3] [--json FILE]

A search is 30 times the futures of 300 candidates over five blocks, of 196 tokens a frame. Tokens of 112 numbers are
EfficientNet-Lite0's, of 384 DINOv2-S's. Weights and frames are random. On CUDA, futures are captured as a search
captures them. The plain layers are what runs where lewm has no kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lewm.config import PredictorConfig
from lewm.model.token_predictor import TokenPredictor
from lewm.model.token_rollout import TokenRollout

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--features", type=int, nargs="+", default=[112, 384], help="numbers of a token")
    parser.add_argument("--context", type=int, nargs="+", default=[1, 3], help="real frames that a plan starts from")
    parser.add_argument("--tokens", type=int, default=196, help="of a frame")
    parser.add_argument("--samples", type=int, default=300, help="candidates")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'numbers':>8} {'frames':>7} {'seconds':>8} {'plain':>8} {'difference':>11}")
    for features in arguments.features:
        for context in arguments.context:
            rows.append(found := row(features, context, arguments))
            line = "{features:>8} {context:>7} {seconds:>8.2f} {plain_seconds:>8.2f} {difference:>11.1e}"
            print(line.format(**found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
