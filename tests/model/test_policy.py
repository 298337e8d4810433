"""What acting methods are made of."""

from __future__ import annotations

import math

import pytest
import torch

from lewm.model.policy import (
    GaussianActor,
    LaidOut,
    SteeredMLP,
    Values,
    advantage_weight,
    expectile_loss,
    follow,
    mlp,
    situation,
    situation_size,
    waves,
)


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.7, 0.9, 0.99])
def test_expectile_regression_finds_the_expectile(expectile: float):
    """Of a uniform variable it is known: sqrt(τ) / (sqrt(τ) + sqrt(1 - τ))."""
    drawn = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    estimate = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([estimate], lr=0.4)
    for _ in range(400):
        optimizer.zero_grad()
        expectile_loss(drawn - estimate, expectile).mean().backward()
        optimizer.step()
    known = math.sqrt(expectile) / (math.sqrt(expectile) + math.sqrt(1 - expectile))
    assert estimate.item() == pytest.approx(known, abs=1e-4)


def test_the_expectile_loss_is_its_formula():
    u = torch.randn(100, generator=torch.Generator().manual_seed(0))
    expected = [abs(0.8 - (1.0 if x < 0 else 0.0)) * x**2 for x in u.tolist()]
    torch.testing.assert_close(expectile_loss(u, 0.8), torch.tensor(expected))


def test_weights_are_capped_and_have_no_gradient():
    advantage = torch.tensor([-1.0, 0.0, 1.0, 10.0], requires_grad=True)
    weight = advantage_weight(advantage, 3.0)
    torch.testing.assert_close(weight, torch.tensor([math.exp(-3), 1.0, math.exp(3), 100.0]))
    assert not weight.requires_grad


def test_the_actors_surprise_is_that_of_a_normal_distribution():
    torch.manual_seed(0)
    actor = GaussianActor(4, 8, 1, 3)
    x, block = torch.randn(5, 2, 4), torch.randn(5, 2, 3)
    with torch.no_grad():
        actor.log_std.copy_(torch.tensor([-9.0, 0.3, 7.0]))
    spread = torch.tensor([-5.0, 0.3, 2.0]).exp()  # kept within bounds
    expected = -torch.distributions.Normal(actor(x), spread).log_prob(block).mean(-1)
    torch.testing.assert_close(actor.surprise(x, block), expected)


def test_a_situation_tells_how_much_is_known():
    """Frames stand at its end, oldest first; zeros that were seen differ from what was not."""
    seen = torch.arange(1.0, 7.0).view(1, 3, 2)
    assert situation(seen, 3).tolist() == [[1, 2, 1, 3, 4, 1, 5, 6, 1]]
    assert situation(seen[:, -1:], 3).tolist() == [[0, 0, 0, 0, 0, 0, 5, 6, 1]]
    assert situation(seen[:, -1:], 1).tolist() == [[5, 6]]
    nothing = torch.zeros(1, 3, 2)
    lengths = [situation(nothing[:, :length], 3) for length in (1, 2, 3)]
    assert len({tuple(known[0].tolist()) for known in lengths}) == 3
    for history in (1, 2, 3):
        assert situation(torch.zeros(1, 1, 2), history).shape == (1, situation_size(2, history))


def test_tokens_are_told_apart_by_their_place():
    torch.manual_seed(0)
    layout, tokens = LaidOut(6, 4, 8), torch.randn(2, 3, 6, 4)
    laid = layout(tokens)
    assert laid.shape == (2, 3, 8)
    for token in range(6):
        moved = tokens.clone()
        moved[..., token, :] = torch.randn(4)
        assert (layout(moved) - laid).abs().amin(0).max() > 1e-3
    assert (layout(tokens.flip(-2)) - laid).abs().max() > 1e-2


def test_steering_begins_without_effect_and_gets_one():
    torch.manual_seed(0)
    head = SteeredMLP(3, 4, 8, 2, 5)
    x, one, other = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6, 4)
    assert torch.equal(head(x, one), head(x, other))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (head(x, one).square().mean() - head(x, other).square().mean()).backward()
        optimizer.step()
    assert (head(x, one) - head(x, other)).abs().max() > 1e-3


def test_numbers_of_steps_are_told_apart():
    told = waves(torch.arange(1, 101), 32)
    apart = torch.cdist(told, told) + 10 * torch.eye(100)
    assert apart.min() > 0.05
    near, far = (waves(torch.tensor([10.0, other]), 32) for other in (10.1, 11.0))
    assert (near[0] - near[1]).norm() < (far[0] - far[1]).norm()


def test_targets_follow_in_place():
    torch.manual_seed(0)
    fast, slow = mlp(2, 4, 1, 1), mlp(2, 4, 1, 1)
    before = [(p.clone(), p.data_ptr()) for p in slow.parameters()]
    follow(slow.parameters(), fast.parameters(), 0.1)
    for (old, place), target, source in zip(before, slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(target, 0.9 * old + 0.1 * source)
        assert target.data_ptr() == place


def test_values_are_independent_and_the_least_is_theirs():
    torch.manual_seed(0)
    values, x = Values(3, 8, 1, count=2), torch.randn(7, 4, 3)
    assert values(x).shape == (2, 7, 4)
    assert torch.equal(values.least(x), torch.minimum(*values(x)))
    assert not torch.equal(*values(x))
