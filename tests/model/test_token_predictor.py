"""A transformer over the tokens of several frames: who sees whom, and what that costs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lewm.config import PredictorConfig
from lewm.model.token_predictor import TokenPredictor

M, T, N, F, A, E = 2, 3, 4, 5, 6, 3
CONFIG = PredictorConfig(depth=2, heads=2, head_width=8, mlp_width=16, dropout=0.5)


@pytest.fixture
def predictor() -> TokenPredictor:
    torch.manual_seed(0)
    return TokenPredictor(T, N, F, A, E, CONFIG).eval()


@pytest.fixture
def z_MTNF() -> torch.Tensor:
    return torch.randn(M, T, N, F, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def actions_MTA() -> torch.Tensor:
    return torch.randn(M, T, A, generator=torch.Generator().manual_seed(2))


def changed_frames(one: torch.Tensor, other: torch.Tensor) -> list[bool]:
    """Which of the predictions (M, T, N, F) differ, by frame; of those that do, every token does."""
    differs_MTN = (one != other).any(-1)
    by_frame = [differs_MTN[:, t] for t in range(one.shape[1])]
    assert all(bool(frame.all()) == bool(frame.any()) for frame in by_frame)
    return [bool(frame.any()) for frame in by_frame]


@torch.no_grad()
@pytest.mark.parametrize("frame", range(T))
def test_a_frame_and_its_action_change_no_earlier_prediction_and_every_later_one(
    predictor: TokenPredictor, z_MTNF: torch.Tensor, actions_MTA: torch.Tensor, frame: int
):
    before = predictor(z_MTNF, actions_MTA)
    other_z, other_actions = z_MTNF.clone(), actions_MTA.clone()
    other_z[:, frame, 1] += 1  # one of its tokens, which every token of its own frame sees
    other_actions[:, frame] += 1
    expected = [t >= frame for t in range(T)]
    assert changed_frames(before, predictor(other_z, actions_MTA)) == expected
    assert changed_frames(before, predictor(z_MTNF, other_actions)) == expected


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2])
def test_fewer_frames_have_the_predictions_that_they_have_among_more(
    predictor: TokenPredictor, z_MTNF: torch.Tensor, actions_MTA: torch.Tensor, frames: int
):
    fewer = predictor(z_MTNF[:, :frames], actions_MTA[:, :frames])
    torch.testing.assert_close(fewer, predictor(z_MTNF, actions_MTA)[:, :frames])


def test_attention_too_drops_out_in_training_only(
    predictor: TokenPredictor, z_MTNF: torch.Tensor, actions_MTA: torch.Tensor
):
    attention = predictor.layers()[0].attention
    attention.dropout.train()
    attention.out = torch.nn.Identity()  # without it what is left of attention can be counted
    x_MTNW = predictor.place(z_MTNF, predictor.action_embedder(actions_MTA), 0)
    torch.manual_seed(0)
    dropped, _ = attention(x_MTNW, None, T)
    torch.manual_seed(1)
    again, _ = attention(x_MTNW, None, T)
    both = (dropped != 0) & (again != 0)
    assert both.any()
    assert not torch.allclose(dropped[both], again[both])  # the weights behind what both have kept are others
    attention.eval()
    torch.testing.assert_close(attention(x_MTNW, None, T)[0], attention(x_MTNW, None, T)[0], rtol=0, atol=0)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_the_count_is_pytorchs(predictor: TokenPredictor, z_MTNF: torch.Tensor, actions_MTA: torch.Tensor, frames: int):
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predictor(z_MTNF[:, :frames], actions_MTA[:, :frames])
    assert counter.get_total_flops() == M * predictor.flops(frames)
