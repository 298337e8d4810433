"""The planner's rollout: the numbers of ``LeWM.rollout``, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lewm.config import PredictorConfig
from lewm.errors import PlanningError
from lewm.kernels.rollout_fast import FastRollout
from lewm.methods.lewm import LeWM
from lewm.presets import preset


def random_model(history: int, heads: int = 2) -> LeWM:
    """Untrained, but nothing in it is trivial: neither the zero-initialised modulation nor BatchNorm's statistics."""
    torch.manual_seed(history)
    predictor = PredictorConfig(depth=3, heads=heads, head_width=8, mlp_width=32)
    model = LeWM(replace(preset("debug").method, predictor=predictor, history=history)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        norm = model.prediction_projector.norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return model


def random_futures(model: LeWM, context: int, horizon: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Arguments of a rollout: two episodes, four candidates."""
    generator = torch.Generator().manual_seed(seed)
    block, width = model.settings.block_dim, model.settings.embed_dim
    shapes = (2, context, width), (2, context - 1, block), (2, 4, horizon, block)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize("horizon", range(1, 7))
@pytest.mark.parametrize(("history", "context"), [(1, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 3)])
@torch.no_grad()
def test_predictions_are_those_of_the_model(history: int, context: int, horizon: int):
    model = random_model(history)
    arguments = random_futures(model, context, horizon)
    expected = model.rollout(*arguments)
    predicted = FastRollout(model)(*arguments)
    assert predicted.shape == (2, 4, horizon, model.settings.embed_dim)
    torch.testing.assert_close(predicted, expected, rtol=1e-5, atol=1e-5)
    # Not because actions or frames went nowhere.
    assert expected.std(1).min() > 1e-3
    assert (expected[0] - expected[1]).abs().max() > 1e-2


@pytest.mark.parametrize(("history", "context"), [(1, 1), (3, 1), (3, 3)])
def test_gradients_are_those_of_the_model(history: int, context: int):
    model = random_model(history).requires_grad_(False)
    z, past, actions = random_futures(model, context, horizon=5)
    actions.requires_grad_()
    weights = torch.randn(2, 4, 5, model.settings.embed_dim, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((weights * model.rollout(z, past, actions)).sum(), actions)
    (gradient,) = torch.autograd.grad((weights * FastRollout(model)(z, past, actions)).sum(), actions)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().amax((0, 1, 3)).min() > 1e-2


@torch.no_grad()
def test_attention_to_itself_alone_costs_one_product_whatever_the_number_of_heads():
    counts = []
    for heads in (2, 8):
        model = random_model(history=1, heads=heads)
        rollout, arguments = FastRollout(model), random_futures(model, 1, 3)
        with FlopCounterMode(display=False) as counter:
            rollout(*arguments)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@torch.no_grad()
def test_the_weights_are_a_copy():
    model = random_model(3)
    arguments = random_futures(model, 2, 3)
    rollout = FastRollout(model)
    before = rollout(*arguments)
    for parameter in model.parameters():
        parameter.mul_(1.5)
    assert torch.equal(rollout(*arguments), before)
    assert not torch.allclose(FastRollout(model)(*arguments), before)


@torch.no_grad()
def test_bf16_is_near_and_still_answers_in_float32():
    model = random_model(3)
    arguments = random_futures(model, 3, 5)
    exact, rounded = model.rollout(*arguments), model.planning_rollout("bf16")(*arguments)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.05


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(PlanningError, match=r"evaluation mode.*model\.eval\(\)"):
        FastRollout(random_model(3).train())
