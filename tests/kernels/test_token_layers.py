"""The layers for planning against the predictor's own: in Triton's interpreter on the CPU, compiled on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from lewm.config import PredictorConfig
from lewm.kernels.token_layers import TokenLayers
from lewm.model.token_predictor import TokenPredictor, attend

M, N, E = 3, 5, 3


def make_predictor(features: int, mlp_width: int, device: str = "cpu") -> TokenPredictor:
    """With no weight left trivial."""
    torch.manual_seed(0)
    predictor = TokenPredictor(3, N, features, 4, E, PredictorConfig(2, 2, 64, mlp_width, dropout=0.5)).eval()
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return predictor.to(device).requires_grad_(False)


def window(predictor: TokenPredictor, frames: int) -> torch.Tensor:
    """Tokens that are placed, (M, frames, N, W)."""
    generator = torch.Generator().manual_seed(frames)
    z, action = (torch.randn(M, frames, *last, generator=generator) for last in ((N, predictor.features), (E,)))
    device = predictor.positions.device
    return predictor.place(z.to(device), action.to(device), 0)


def error(predictor: TokenPredictor, dtype: torch.dtype) -> float:
    """Largest difference from the predictor's own layers, relative to their largest number.

    As a window of three frames at once, and as one that grows from two frames to three.
    """
    x_MTNW = window(predictor, 3)
    expected = x_MTNW
    for block in predictor.layers():
        expected = block(expected)
    layers = TokenLayers(predictor.blocks, attend, dtype)
    seen: list[torch.Tensor | None] = [None, None]
    whole = layers(x_MTNW, [None, None], keep=False)
    two, three = layers(x_MTNW[:, :2], seen, keep=True), layers(x_MTNW[:, 2:], seen, keep=True)
    found = torch.cat([two, whole, three], dim=1)
    wanted = torch.cat([expected[:, 1:], expected[:, 2:]], dim=1)
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


# Features, hidden units, type and tolerance. 64 hidden units are done by one kernel, 40 are not; 10 + 3 numbers are
# padded. The interpreter cannot multiply bfloat16; float16 shows that narrow types get through.
CASES = ["10 64 float32 1e-5", "10 40 float32 1e-5", "61 64 float32 1e-5", "10 64 float16 1e-2"]


@pytest.mark.parametrize("case", CASES)
def test_interpreted_layers_compute_what_the_predictor_does(case: str, run_interpreted):
    run_interpreted(__file__, *case.split())


@pytest.mark.cuda(9)
@pytest.mark.parametrize("features", [112, 384])
def test_compiled_layers_are_as_exact_as_bfloat16_allows(features: int):
    assert error(make_predictor(features, 2048, "cuda"), torch.bfloat16) < 3e-2


if __name__ == "__main__":
    torch.set_num_threads(1)
    features, mlp_width, dtype, tolerance = sys.argv[1:]
    assert error(make_predictor(int(features), int(mlp_width)), getattr(torch, dtype)) < float(tolerance)
