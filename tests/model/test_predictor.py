"""The predictor looks only backwards, starts without the actions' influence, and drops out only in training."""

from __future__ import annotations

import pytest
import torch

from lewm.model.predictor import ActionEmbedder, Predictor
from lewm.presets import preset

CONFIG = preset("debug").method
BATCH, TIME, DIM = 4, CONFIG.history, CONFIG.embed_dim


@pytest.fixture
def predictor() -> Predictor:
    """In evaluation mode, with the modulation away from its initial zeros, as after some training."""
    torch.manual_seed(0)
    model = Predictor(CONFIG).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.modulation.linear.weight, std=0.5)
        torch.nn.init.normal_(block.modulation.linear.bias, std=0.5)
    return model


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, action = torch.randn(2, BATCH, TIME, DIM, generator=generator)
    return z, action


@pytest.mark.parametrize("changed", ["embedding", "action"])
@torch.inference_mode()
def test_a_token_influences_itself_and_the_future_but_never_the_past(predictor: Predictor, changed: str) -> None:
    z, action = random_inputs()
    before = predictor(z, action)
    for t in range(TIME):
        z_new, action_new = z.clone(), action.clone()
        (z_new if changed == "embedding" else action_new)[:, t] += torch.randn(DIM)
        after = predictor(z_new, action_new)
        assert torch.equal(after[:, :t], before[:, :t])
        moved = (after - before)[:, t:].abs().amax(dim=(0, 2))
        assert (moved > 1e-4).all()


@torch.inference_mode()
def test_a_shorter_window_gives_the_same_predictions(predictor: Predictor) -> None:
    z, action = random_inputs()
    whole = predictor(z, action)
    for t in range(1, TIME):
        torch.testing.assert_close(predictor(z[:, :t], action[:, :t]), whole[:, :t])


@torch.inference_mode()
def test_positions_are_told_apart(predictor: Predictor) -> None:
    z = torch.ones(1, TIME, DIM)
    out = predictor(z, torch.zeros_like(z))
    assert (out[:, 1:] - out[:, :-1]).abs().amax(dim=-1).min() > 1e-3


@torch.inference_mode()
def test_at_first_every_block_is_the_identity_and_actions_do_not_matter() -> None:
    torch.manual_seed(0)
    predictor = Predictor(CONFIG)  # in training mode: even dropout is behind the closed gates
    z, action = random_inputs()
    out = predictor(z, action)
    assert torch.equal(out, predictor(z, action + 1))
    torch.testing.assert_close(out, predictor.norm(z + predictor.positions))


@torch.inference_mode()
def test_dropout_acts_only_in_training(predictor: Predictor) -> None:
    z, action = random_inputs()
    assert torch.equal(predictor(z, action), predictor(z, action))
    predictor.train()
    assert not torch.equal(predictor(z, action), predictor(z, action))


def test_the_first_gradient_opens_the_gates() -> None:
    """Zero-initialised modulation must still learn, or the actions would be ignored for ever."""
    torch.manual_seed(0)
    predictor = Predictor(CONFIG)
    z, action = random_inputs()
    predictor(z, action).mul(torch.randn(DIM)).sum().backward()
    gates = [block.modulation.linear.weight.grad.chunk(6)[k] for block in predictor.blocks for k in (2, 5)]
    assert all(gate.abs().max() > 1e-4 for gate in gates)


@torch.inference_mode()
def test_actions_are_embedded_one_block_at_a_time() -> None:
    torch.manual_seed(0)
    embedder = ActionEmbedder(block_dim=10, bottleneck=10, width=DIM)
    actions = torch.randn(2, TIME, 10)
    embedded = embedder(actions)
    assert embedded.shape == (2, TIME, DIM)
    torch.testing.assert_close(embedded[1, 2], embedder(actions[1, 2]))
