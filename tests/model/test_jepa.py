"""The world model as a planner uses it: encode, predict, roll out, convert actions."""

from __future__ import annotations

import pytest
import torch

from lewm.errors import PlanningError
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts

CONFIG = preset("debug").method
STATS = ActionStats(mean=(0.25, -1.5), std=(2.0, 0.125))


@pytest.fixture
def model() -> LeWM:
    """In evaluation mode, with the gates and BatchNorm statistics away from their initial values."""
    torch.manual_seed(0)
    model = LeWM(CONFIG, DataFacts(STATS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for projector in (model.projector, model.prediction_projector):
            projector.norm.running_mean.normal_()
            projector.norm.running_var.uniform_(0.5, 2)
    return model


def random_frames(*leading: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (*leading, 28, 28, 3), dtype=torch.uint8, generator=generator)


# -- encode -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_leading_dimensions_do_not_matter(model: LeWM) -> None:
    frames = random_frames(2, 3)
    z = model.encode(frames)
    assert z.shape == (2, 3, CONFIG.embed_dim)
    torch.testing.assert_close(model.encode(frames.flatten(0, 1)), z.flatten(0, 1))
    torch.testing.assert_close(model.encode(frames[1, 2]), z[1, 2])


@torch.inference_mode()
def test_a_frame_is_embedded_independently_of_its_companions_only_in_evaluation_mode(model: LeWM) -> None:
    frames = random_frames(4)
    torch.testing.assert_close(model.encode(frames)[:2], model.encode(frames[:2]))
    model.train()
    assert (model.encode(frames)[:2] - model.encode(frames[:2])).abs().max() > 1e-2


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(2, 56, 56, 3, dtype=torch.uint8),
        torch.zeros(2, 3, 28, 28, dtype=torch.uint8),
        torch.zeros(2, 28, 28, 3),
        torch.zeros(28, 28, dtype=torch.uint8),
    ],
    ids=["resolution", "channels first", "float", "grey"],
)
def test_frames_that_do_not_fit_are_refused(model: LeWM, frames: torch.Tensor) -> None:
    with pytest.raises(PlanningError, match=r"Expected uint8 frames of shape \(\.\.\., 28, 28, 3\), got"):
        model.encode(frames)


# -- rollout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 2, 3, 5])
@torch.inference_mode()
def test_a_rollout_is_repeated_prediction_over_a_sliding_window(model: LeWM, context: int) -> None:
    batch, samples, horizon = 2, 3, 4
    z_BTD = model.encode(random_frames(batch, context))
    past_BTA = torch.randn(batch, context - 1, CONFIG.block_dim)
    actions_BSHA = torch.randn(batch, samples, horizon, CONFIG.block_dim)
    imagined = model.rollout(z_BTD, past_BTA, actions_BSHA)
    assert imagined.shape == (batch, samples, horizon, CONFIG.embed_dim)

    for b in range(batch):
        for s in range(samples):
            z = z_BTD[b]
            actions = torch.cat([past_BTA[b], actions_BSHA[b, s]])
            for step in range(horizon):
                window = slice(max(0, len(z) - CONFIG.history), len(z))
                predicted = model.predict(z[None, window], actions[None, window])[0, -1]
                torch.testing.assert_close(imagined[b, s, step], predicted)
                z = torch.cat([z, predicted[None]])


@torch.inference_mode()
def test_an_action_changes_the_future_from_its_own_block_on(model: LeWM) -> None:
    z_BTD, past_BTA = model.encode(random_frames(1, 1)), torch.zeros(1, 0, CONFIG.block_dim)
    actions_BSHA = torch.zeros(1, 2, 4, CONFIG.block_dim)
    actions_BSHA[:, 1, 2] = 1
    plain, changed = model.rollout(z_BTD, past_BTA, actions_BSHA)[0]
    torch.testing.assert_close(plain[:2], changed[:2])
    assert ((plain - changed)[2:].abs().amax(dim=-1) > 1e-4).all()


@torch.inference_mode()
def test_the_executed_actions_and_older_frames_matter(model: LeWM) -> None:
    z_BTD, past_BTA = model.encode(random_frames(1, 2)), torch.zeros(1, 1, CONFIG.block_dim)
    plan = torch.zeros(1, 1, 1, CONFIG.block_dim)
    future = model.rollout(z_BTD, past_BTA, plan)
    assert (model.rollout(z_BTD, past_BTA + 1, plan) - future).abs().max() > 1e-4
    assert (model.rollout(z_BTD.flip(1), past_BTA, plan) - future).abs().max() > 1e-4


def test_a_context_without_the_actions_between_its_frames_is_refused(model: LeWM) -> None:
    z_BTD, plan = torch.zeros(1, 3, CONFIG.embed_dim), torch.zeros(1, 1, 2, CONFIG.block_dim)
    for given in (0, 1, 3):
        with pytest.raises(PlanningError, match=f"3 frames needs the 2 action blocks.*got {given}"):
            model.rollout(z_BTD, torch.zeros(1, given, CONFIG.block_dim), plan)


def test_a_rollout_can_be_descended(model: LeWM) -> None:
    """Gradient planners differentiate the imagined future with respect to every action."""
    plan = torch.zeros(1, 1, 3, CONFIG.block_dim, requires_grad=True)
    z_BTD = torch.ones(1, 1, CONFIG.embed_dim)
    model.rollout(z_BTD, torch.zeros(1, 0, CONFIG.block_dim), plan)[..., -1, :].square().sum().backward()
    assert (plan.grad[0, 0].abs().amax(dim=-1) > 0).all()


# -- actions ----------------------------------------------------------------------------------------------


def test_normalising_is_z_scoring_each_primitive_action(model: LeWM) -> None:
    raw = torch.tensor(STATS.mean).repeat(CONFIG.frame_skip, 1)
    raw[3] += torch.tensor(STATS.std)
    expected = torch.zeros(CONFIG.frame_skip, CONFIG.action_dim)
    expected[3] = 1
    torch.testing.assert_close(model.normalise_actions(raw), expected.flatten())


def test_normalising_and_denormalising_are_inverse(model: LeWM) -> None:
    raw = torch.randn(4, 3, CONFIG.frame_skip, CONFIG.action_dim)
    blocks = model.normalise_actions(raw)
    assert blocks.shape == (4, 3, CONFIG.block_dim)
    torch.testing.assert_close(model.denormalise_actions(blocks), raw)
    torch.testing.assert_close(model.normalise_actions(model.denormalise_actions(blocks)), blocks)


def test_a_model_without_statistics_refuses_raw_actions() -> None:
    model = LeWM(CONFIG)
    with pytest.raises(PlanningError, match="no action statistics"):
        model.normalise_actions(torch.zeros(1, CONFIG.frame_skip, CONFIG.action_dim))
    with pytest.raises(PlanningError, match="no action statistics"):
        model.denormalise_actions(torch.zeros(1, CONFIG.block_dim))


def test_whole_numbers_are_actions_too(model: LeWM) -> None:
    raw = torch.tensor([[[1, 0]] * 5, [[0, -2]] * 5])
    blocks = model.normalise_actions(raw)
    assert blocks.isfinite().all()
    torch.testing.assert_close(blocks, model.normalise_actions(raw.float()))
    torch.testing.assert_close(
        model.denormalise_actions(torch.ones(2, 10, dtype=torch.int64)), model.denormalise_actions(torch.ones(2, 10))
    )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@torch.no_grad()
def test_a_planning_encoder_is_a_frozen_copy(model: LeWM, precision: str) -> None:
    """A model that is trained on, or put into another mode, changes nothing for who plans already."""
    frames = torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8)
    encode = model.planning_encoder(precision)
    before = encode(frames)
    if precision == "float32":
        assert torch.equal(before, model.encode(frames))
    for parameter in model.parameters():
        parameter.add_(1.0)
    model.train()
    assert torch.equal(encode(frames), before)
