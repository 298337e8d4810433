"""Imagined frames of tokens: the predictor's own, whatever is kept, shared, or computed in parts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lewm.config import PredictorConfig
from lewm.model import token_rollout
from lewm.model.token_predictor import TokenPredictor
from lewm.model.token_rollout import TokenRollout

B, S, T, N, F, A, E = 2, 5, 3, 4, 5, 6, 3
CONFIG = PredictorConfig(depth=3, heads=2, head_width=8, mlp_width=16, dropout=0.5)
Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def predictor() -> TokenPredictor:
    """In training mode: what a rollout makes of it does not drop out."""
    torch.manual_seed(0)
    return TokenPredictor(T, N, F, A, E, CONFIG)


def problem(context: int = 1, horizon: int = 5, samples: int = S) -> Problem:
    """Flattened tokens of real frames, blocks between them, candidates."""
    generator = torch.Generator().manual_seed(1)
    sizes = (B, context, N * F), (B, context - 1, A), (B, samples, horizon, A)
    z_BTD, past_BTA, actions_BSHA = (torch.randn(size, generator=generator) for size in sizes)
    return z_BTD, past_BTA, actions_BSHA


GOAL_BD = torch.randn(B, N * F, generator=torch.Generator().manual_seed(2))


def uncached(predictor: TokenPredictor, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions: torch.Tensor):
    """Every candidate alone, every window as a whole: predictions (B, S, H, D)."""
    predictor.eval()
    futures = []
    for episode, candidates in enumerate(actions):
        for plan_HA in candidates:
            frames = [*z_BTD[episode].unflatten(-1, (N, F))]
            blocks = torch.cat([past_BTA[episode], plan_HA])
            for end in range(len(frames), len(frames) + len(plan_HA)):
                window = slice(max(0, end - T), end)
                frames.append(predictor(torch.stack(frames[window])[None], blocks[window][None])[0, -1])
            futures.append(torch.stack(frames[-len(plan_HA) :]).flatten(1))
    predictor.train()
    return torch.stack(futures).unflatten(0, actions.shape[:2])


@torch.no_grad()
@pytest.mark.parametrize("context", [1, 2, 3])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_what_is_kept_of_a_window_changes_no_prediction(predictor: TokenPredictor, context: int, horizon: int):
    """Also where the window slides, and every position with it."""
    asked = problem(context, horizon)
    torch.testing.assert_close(
        TokenRollout(predictor, "float32").predictions(*asked), uncached(predictor, *asked), atol=1e-5, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("context", [1, 3])
def test_distances_are_those_of_the_embeddings(predictor: TokenPredictor, context: int):
    asked, rollout = problem(context), TokenRollout(predictor, "float32")
    expected = (rollout.predictions(*asked) - GOAL_BD[:, None, None]).square().mean(-1)
    torch.testing.assert_close(rollout.distances(*asked, GOAL_BD), expected)


@torch.no_grad()
@pytest.mark.parametrize("bytes_of_a_part", [1, 30_000, 60_000])
@pytest.mark.parametrize("context", [1, 3])
def test_parts_change_nothing(
    predictor: TokenPredictor, monkeypatch: pytest.MonkeyPatch, context: int, bytes_of_a_part: int
):
    asked = problem(context)
    whole = TokenRollout(predictor, "float32")
    monkeypatch.setattr(token_rollout, "PART_BYTES_OF_A_CPU", bytes_of_a_part)
    parts = TokenRollout(predictor, "float32")
    torch.testing.assert_close(parts.distances(*asked, GOAL_BD), whole.distances(*asked, GOAL_BD))
    torch.testing.assert_close(parts.predictions(*asked), whole.predictions(*asked))


@torch.no_grad()
def test_a_part_takes_no_more_memory_than_it_may(predictor: TokenPredictor, monkeypatch: pytest.MonkeyPatch):
    """As many tokens go through the largest layer at once, however many candidates there are."""
    monkeypatch.setattr(token_rollout, "PART_BYTES_OF_A_CPU", 60_000)
    largest = []
    rollout = TokenRollout(predictor, "float32")
    real = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, **kw: (largest.append(x.numel()), real(x, **kw))[1])
    for samples in (1, 3, 64):
        rollout.distances(*problem(1, 5, samples), GOAL_BD)
    assert max(largest) * 4 < 60_000


def flops_of(predictor: TokenPredictor, context: int, samples: int) -> int:
    rollout = TokenRollout(predictor, "float32")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        rollout.distances(*problem(context, 5, samples), GOAL_BD)
    return counter.get_total_flops()


@pytest.mark.parametrize("context", [1, 2, 3])
def test_what_candidates_share_is_computed_once(predictor: TokenPredictor, context: int):
    """And a rollout computes less than the windows that its predictions are counted as."""
    six, twelve = flops_of(predictor, context, 6), flops_of(predictor, context, 12)
    each = (twelve - six) // 6
    shared = six - 6 * each
    assert (shared > 0) == (context > 1)
    counted = B * sum(predictor.flops(min(end, T)) for end in range(context, context + 5))
    assert each < 0.95 * counted


@pytest.mark.parametrize("context", [1, 3])
@pytest.mark.parametrize("bytes_of_a_part", [1, 1 << 28])
def test_distances_have_the_gradient_of_the_uncached_rollout(
    predictor: TokenPredictor, monkeypatch: pytest.MonkeyPatch, context: int, bytes_of_a_part: int
):
    monkeypatch.setattr(token_rollout, "PART_BYTES_OF_A_CPU", bytes_of_a_part)
    z_BTD, past_BTA, actions_BSHA = problem(context)
    actions_BSHA.requires_grad_()
    found = TokenRollout(predictor, "float32", differentiable=True).distances(z_BTD, past_BTA, actions_BSHA, GOAL_BD)
    (gradient,) = torch.autograd.grad(found[:, :, -1].sum(), actions_BSHA)
    slow = (uncached(predictor, z_BTD, past_BTA, actions_BSHA) - GOAL_BD[:, None, None]).square().mean(-1)
    (expected,) = torch.autograd.grad(slow[:, :, -1].sum(), actions_BSHA)
    assert expected.abs().min() > 0
    torch.testing.assert_close(gradient, expected)


@torch.no_grad()
def test_half_precision_is_about_as_good(predictor: TokenPredictor):
    asked = *problem(), GOAL_BD
    exact = TokenRollout(predictor, "float32").distances(*asked)
    half = TokenRollout(predictor, "bf16").distances(*asked)
    assert half.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=0.02, atol=0)


@torch.no_grad()
def test_training_goes_on_without_the_rollout(predictor: TokenPredictor):
    """Its copy of the weights is frozen, and the predictor is left as it was."""
    rollout, asked = TokenRollout(predictor, "float32"), problem()
    before = rollout.predictions(*asked)
    assert predictor.training
    assert all(parameter.requires_grad for parameter in predictor.parameters())
    for parameter in predictor.parameters():
        parameter.add_(1)
    torch.testing.assert_close(rollout.predictions(*asked), before, atol=0, rtol=0)
