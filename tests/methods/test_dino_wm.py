"""DINO-WM: its loss against a literal transcription, its tokens, and planning with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lewm
from lewm.cli import run
from lewm.config import Config, PlanConfig, PredictorConfig, SolverName
from lewm.errors import ConfigError, PlanningError
from lewm.evaluate.runner import evaluate
from lewm.methods.dino_wm import DinoWM, DinoWMConfig, pixel_tokens
from lewm.methods.lewm import LeWM
from lewm.plan.planner import Planner
from lewm.presets import PRESETS, preset
from lewm.types import ALONE, ActionStats, Array, Batch, DataFacts

B, HISTORY = 3, 3
STATS = ActionStats((0.1, -0.2), (0.5, 2.0))


def model_of(settings: DinoWMConfig, facts: DataFacts | None = None) -> DinoWM:
    """With weights on which actions have a clear effect, and without dropout."""
    torch.manual_seed(0)
    model = settings.build(facts or DataFacts(STATS)).eval()
    with torch.no_grad():
        for parameter in model.predictor.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def model() -> DinoWM:
    settings = preset("debug", "dino_wm").method
    assert isinstance(settings, DinoWMConfig)
    return model_of(replace(settings, predictor=PredictorConfig(2, 2, 8, 32)))


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (B, HISTORY + 1, 28, 28, 3), dtype=torch.uint8, generator=generator)
    return Batch(torch.randn(B, HISTORY + 1, 5, 2, generator=generator), pixels)


# -- the loss --------------------------------------------------------------------------------------------------------


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def literal_predictions(model: DinoWM, z_TNF: Array, actions_TA: Array) -> Array:
    """Of one window, as the original writes it: all tokens in a row, and a mask that hides later frames."""
    weights = {name: tensor.double().numpy() for name, tensor in model.predictor.state_dict().items()}
    frames, tokens, features = z_TNF.shape
    embedded_TE = actions_TA @ weights["action_embedder.weight"].T + weights["action_embedder.bias"]
    row = [[*z_TNF[t, n], *embedded_TE[t]] for t in range(frames) for n in range(tokens)]
    x_LW = np.array(row) + weights["positions"][0].reshape(frames * tokens, -1)
    frame_of = np.arange(len(x_LW)) // tokens
    hidden = frame_of[:, None] < frame_of[None, :]
    for layer in range(2):
        own = {n.removeprefix(f"blocks.{layer}."): w for n, w in weights.items() if n.startswith(f"blocks.{layer}.")}
        normed = layer_norm(x_LW, own["attention.norm.weight"], own["attention.norm.bias"])
        answers = []
        q, k, v = (normed @ part.T for part in np.split(own["attention.qkv.weight"], 3))
        for head in range(2):
            mine = slice(8 * head, 8 * head + 8)
            scores = q[:, mine] @ k[:, mine].T / math.sqrt(8)
            scores[hidden] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            answers.append(shares / shares.sum(-1, keepdims=True) @ v[:, mine])
        x_LW = x_LW + np.concatenate(answers, -1) @ own["attention.out.weight"].T + own["attention.out.bias"]
        normed = layer_norm(x_LW, own["mlp.0.weight"], own["mlp.0.bias"])
        x_LW = x_LW + gelu(normed @ own["mlp.1.weight"].T + own["mlp.1.bias"]) @ own["mlp.4.weight"].T
        x_LW = x_LW + own["mlp.4.bias"]
    predicted = layer_norm(x_LW, weights["norm.weight"], weights["norm.bias"])
    return predicted.reshape(frames, tokens, -1)[..., :features]


def literal_tokens(frame: Array) -> Array:
    """Of 28 pixels: four patches of 14, each with the mean colours of four squares."""
    tokens = []
    for top in (0, 14):
        for left in (0, 14):
            squares = [frame[top + i : top + i + 7, left + j : left + j + 7] for i in (0, 7) for j in (0, 7)]
            tokens.append(np.concatenate([(square.mean((0, 1)) / 255 - 0.5) / 0.5 for square in squares]))
    return np.array(tokens)


def test_the_loss_is_the_mean_squared_error_of_the_next_frames_tokens(model: DinoWM, batch: Batch):
    assert batch.pixels is not None
    errors = []
    for frames, raw in zip(batch.pixels.numpy(), batch.actions.double().numpy(), strict=True):
        z_TNF = np.stack([literal_tokens(frame) for frame in frames])
        actions = ((raw - STATS.mean) / STATS.std).reshape(HISTORY + 1, -1)
        errors.append(literal_predictions(model, z_TNF[:-1], actions[:-1]) - z_TNF[1:])
    losses = model.losses(batch, {}, ALONE)
    assert losses.total.item() == pytest.approx(np.square(errors).mean(), rel=1e-4)
    assert losses.terms.keys() == {"prediction"}


def test_the_last_block_of_a_window_is_not_read(model: DinoWM, batch: Batch):
    other = batch.actions.clone()
    other[:, -1] += 5
    assert torch.equal(
        model.losses(batch, {}, ALONE).total, model.losses(replace(batch, actions=other), {}, ALONE).total
    )


def test_pixels_become_tokens_row_by_row():
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 28, 28, 3), np.uint8)
    found = pixel_tokens(torch.from_numpy(frames), 14, 2)
    assert found.shape == (2, 3, 4, 12)
    np.testing.assert_allclose(found[1, 2], literal_tokens(frames[1, 2]), atol=1e-6)


# -- planning --------------------------------------------------------------------------------------------------------


def frames(count: int, size: int = 28, seed: int = 3) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), np.uint8)


def flat(model: DinoWM, images: Array) -> torch.Tensor:
    return model.see(torch.from_numpy(images)).flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_planning_rollout_is_the_rollout(model: DinoWM, context: int):
    z_BTD = flat(model, frames(2 * context)).unflatten(0, (2, context))
    past_BTA, actions_BSHA = torch.randn(2, context - 1, 10), torch.randn(2, 4, 5, 10)
    expected = model.rollout(z_BTD, past_BTA, actions_BSHA)
    fast = model.planning_rollout("float32")(z_BTD, past_BTA, actions_BSHA)
    torch.testing.assert_close(fast, expected, atol=1e-5, rtol=0)
    goal_BD = flat(model, frames(2, seed=4))
    far = model.planning_distances("float32")(z_BTD, past_BTA, actions_BSHA, goal_BD)
    torch.testing.assert_close(far, (expected - goal_BD[:, None, None]).square().mean(-1))


@torch.no_grad()
@pytest.mark.parametrize("context", [1, 2, 3])
def test_its_operations_are_counted_as_pytorch_counts_them(model: DinoWM, context: int):
    z_BTD, past_BTA, actions_BSHA = (
        torch.randn(1, context, 48),
        torch.randn(1, context - 1, 10),
        torch.randn(1, 2, 5, 10),
    )
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.rollout(z_BTD, past_BTA, actions_BSHA)
    assert counter.get_total_flops() == 2 * model.rollout_flops(context, 5)


@pytest.mark.parametrize("objective", ["terminal", "nearest"])
@pytest.mark.parametrize("solver", ["cem", "icem", "adam"])
def test_a_plan_leads_nearer_and_its_distances_are_those_of_its_actions(
    model: DinoWM, solver: SolverName, objective: str
):
    config = PlanConfig(solver, horizon=4, samples=64, elites=8, iterations=6, objective=objective)  # type: ignore[arg-type]
    start, goal = frames(2)
    plan = Planner(model, config=config).plan(start, goal)

    def distances(actions: torch.Tensor) -> torch.Tensor:
        blocks = model.normalise_actions(actions.view(1, 1, 4, 5, 2))
        z_HD = model.rollout(flat(model, start[None])[None], torch.zeros(1, 0, 10), blocks)[0, 0]
        return (z_HD - flat(model, goal[None])).square().mean(-1)

    with torch.no_grad():
        np.testing.assert_allclose(plan.distances, distances(torch.from_numpy(plan.actions)), rtol=1e-4)
        idle = distances(torch.tensor(STATS.mean).expand(20, 2))
    counted = (lambda far: far[-1]) if objective == "terminal" else min
    assert plan.cost == pytest.approx(counted(plan.distances.tolist()))
    assert plan.cost < counted(idle.tolist()) - 0.01


def test_an_agent_of_compact_size_plans_from_all_that_it_saw():
    """By schedules that look at one distance and at all of them."""
    settings = preset("demo", "dino_wm").method
    assert isinstance(settings, DinoWMConfig)
    model = model_of(settings)
    plan = PlanConfig(samples=12, elites=4, iterations=2, horizon=3)
    env = lewm.make_env("tworoom", resolution=56)
    env.reset(seed=0)
    frame = env.render()
    for schedule in ("receding", "soonest"):
        agent = lewm.Agent(model, replace(plan, schedule=schedule), bounds=env.action_space)
        agent.reset(frames(1, 56)[0])
        chosen = np.stack([agent.act(frame) for _ in range(11)])  # the third plan has seen three frames
        assert np.isfinite(chosen).all()
        assert env.action_space.contains(chosen[0])


def test_objectives_of_ones_own_see_the_tokens(model: DinoWM):
    def brightness(z_BSHD: torch.Tensor, _goal: torch.Tensor, _actions: torch.Tensor) -> torch.Tensor:
        assert z_BSHD.shape[2:] == (4, 4 * 12)
        return z_BSHD[:, :, -1].mean(-1)

    config = PlanConfig(horizon=4, samples=64, elites=8, iterations=6)
    start, goal = frames(2)
    dark = Planner(model, config=config, objectives=[brightness]).plan(start, goal).cost
    bright = -Planner(model, config=config, objectives=[lambda *seen: -brightness(*seen)]).plan(start, goal).cost
    assert dark < bright - 0.05


# -- proprioception --------------------------------------------------------------------------------------------------

SENSED = ActionStats((3.0, -1.0, 0.0), (2.0, 0.5, 1.0))


@pytest.fixture
def sensing() -> DinoWM:
    settings = preset("debug", "dino_wm").method
    assert isinstance(settings, DinoWMConfig)
    settings = replace(settings, proprio=True, proprio_width=4, proprio_weight=0.3)
    model = model_of(replace(settings, predictor=PredictorConfig(2, 2, 8, 32)), DataFacts(STATS, proprio=SENSED))
    with torch.no_grad():
        model.proprio_embedder.weight.add_(1)
    return model


def test_what_is_sensed_is_embedded_beside_every_token_and_predicted_too(sensing: DinoWM, batch: Batch):
    assert batch.pixels is not None
    proprio = torch.randn(B, HISTORY + 1, 3, generator=torch.Generator().manual_seed(2)) * 2 + 1
    losses = sensing.losses(replace(batch, proprio=proprio), {}, ALONE)
    weight, bias = (p.detach().double().numpy() for p in sensing.proprio_embedder.parameters())
    errors = []
    for frames, raw, sensed in zip(
        batch.pixels.numpy(), batch.actions.double().numpy(), proprio.double().numpy(), strict=True
    ):
        embedded = ((sensed - SENSED.mean) / SENSED.std) @ weight.T + bias
        rows = [[[*token, *embedded[t]] for token in literal_tokens(frame)] for t, frame in enumerate(frames)]
        z_TNF = np.array(rows)
        actions = ((raw - STATS.mean) / STATS.std).reshape(HISTORY + 1, -1)
        errors.append(literal_predictions(sensing, z_TNF[:-1], actions[:-1]) - z_TNF[1:])
    assert losses.total.item() == pytest.approx(np.square(errors).mean(), rel=1e-4)


def test_its_embedding_is_no_target_that_could_give_way(sensing: DinoWM, batch: Batch):
    """The last frame is a target only: what is sensed there teaches the embedder nothing."""
    proprio = torch.randn(B, HISTORY + 1, 3)
    seen_before = proprio.clone().requires_grad_()
    sensing.losses(replace(batch, proprio=seen_before), {}, ALONE).total.backward()
    assert seen_before.grad is not None
    assert seen_before.grad[:, :-1].abs().min() > 0
    assert seen_before.grad[:, -1].abs().max() == 0


@torch.no_grad()
def test_it_has_a_share_in_the_distance(sensing: DinoWM):
    images, sensed = torch.from_numpy(frames(2)), torch.randn(2, 3)
    z_BD = sensing.planning_encoder()(images, sensed)
    actions_BSHA, none = torch.randn(1, 4, 5, 10), torch.zeros(1, 0, 10)
    imagined = sensing.rollout(z_BD[:1, None], none, actions_BSHA).unflatten(-1, (4, 12 + 4))
    error = (imagined - z_BD[1].view(4, 16)).square()
    expected = error[..., :12].mean((-2, -1)) + 0.3 * error[..., 12:].mean((-2, -1))
    found = sensing.planning_distances("float32")(z_BD[:1, None], none, actions_BSHA, z_BD[1:])
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_planning_encoder_is_a_frozen_copy(sensing: DinoWM):
    images, sensed = torch.from_numpy(frames(2)), torch.randn(2, 3)
    encode = sensing.planning_encoder()
    before = encode(images, sensed)
    for tensor in (*sensing.parameters(), sensing.scale, sensing.proprio_mean):
        tensor.add_(1.0)
    assert torch.equal(encode(images, sensed), before)


def test_an_agent_gives_it_with_every_frame_and_with_the_goal(sensing: DinoWM):
    config = PlanConfig(samples=16, elites=4, iterations=2, horizon=2, schedule="receding")
    (frame, goal), sensed = frames(2), np.random.default_rng(0).normal(size=(20, 3))

    def actions(there: Array, on_the_way: Array) -> Array:
        agent = lewm.Agent(sensing, config)
        agent.reset(goal, 0, proprio=there)
        return np.stack([agent.act(frame, now) for now in on_the_way])

    usual = actions(sensed[0], sensed[1:12])
    np.testing.assert_array_equal(usual, actions(sensed[0], sensed[1:12]))
    assert (usual[:5] != actions(sensed[0] + 1, sensed[1:12])[:5]).any()
    for step, first_changed in ((0, 0), (3, 11), (5, 5), (10, 10)):  # only what is sensed when it plans counts
        other = sensed[1:12].copy()
        other[step] += 1
        changed = (usual != actions(sensed[0], other)).any(1)
        assert not changed[:first_changed].any()
        assert changed[first_changed:].any() == (first_changed < 11)


@pytest.mark.parametrize(("proprio", "got"), [(None, "none"), (np.zeros(2), r"shape \(1, 2\)")])
def test_an_agent_without_it_is_refused(sensing: DinoWM, proprio: Array | None, got: str):
    agent, (frame, goal) = lewm.Agent(sensing, PlanConfig(samples=4, elites=2, iterations=1)), frames(2)
    with pytest.raises(PlanningError, match=rf"senses of itself, 3 numbers.*with the goal: .*\(1, 3\), got {got}"):
        agent.reset(goal, proprio=proprio)
    agent.reset(goal, proprio=np.zeros(3))
    with pytest.raises(PlanningError, match=rf"with the frame: expected shape \(1, 3\), got {got}"):
        agent.act(frame, proprio)
    with pytest.raises(PlanningError, match="senses of itself, 3 numbers"):
        Planner(sensing).plan(frame, goal)


def test_a_planner_is_given_it_too(sensing: DinoWM):
    planner, (frame, goal) = Planner(sensing, config=PlanConfig(samples=8, elites=2, iterations=2)), frames(2)
    plan = planner.plan(frame, goal, proprio=np.ones(3), goal_proprio=np.zeros(3))
    other = planner.plan(frame, goal, proprio=np.ones(3), goal_proprio=np.ones(3))  # of the same image
    assert plan.cost != other.cost


def test_without_statistics_of_it_nothing_is_built():
    with pytest.raises(ConfigError, match=r"method\.proprio asks for what the agent senses.*Train on a dataset"):
        replace(preset("debug", "dino_wm").method, proprio=True).build(DataFacts(STATS))


def test_it_is_trained_and_evaluated_with_proprioception(
    debug_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In evaluation, the world says what is sensed there; it is told to no method that does not read it."""
    arguments = ["train", "debug", "--method", "dino_wm", "--method.proprio", "--data", str(debug_config.data)]
    assert run([*arguments, "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    model = lewm.load(tmp_path / "run", device="cpu")
    assert isinstance(model, DinoWM)
    stats = model.facts.proprio
    assert stats is not None
    assert 20 < stats.mean[0] < 200  # places in a room of 224
    assert run(["info", str(tmp_path / "run")]) == 0
    assert "proprioception weight 1" in " ".join(capsys.readouterr().out.split())
    assert run(["eval", str(tmp_path / "run"), "--device", "cpu", "--out", str(tmp_path / "results.json")]) == 0
    seen = []
    encoder = model.planning_encoder
    model.planning_encoder = lambda precision: (
        lambda frames, sensed: (  # type: ignore[method-assign]
            seen.append(sensed.clone()),
            encoder(precision)(frames, sensed),
        )[1]
    )
    plan = replace(debug_config.plan, schedule="receding")
    result = evaluate(model, replace(debug_config, method=model.settings, plan=plan)).results[0]
    contexts = [sensed[0] for sensed in seen[1:] if sensed.ndim == 3]  # the first is blank
    goals = [sensed[0] for sensed in seen if sensed.ndim == 2]
    start, later = (torch.tensor(result.states[step], dtype=torch.float32) for step in (0, 5))
    assert any(torch.equal(sensed, torch.stack([start, later])) for sensed in contexts)
    assert any(torch.equal(sensed, torch.tensor(result.goal, dtype=torch.float32)) for sensed in goals)


# -- features --------------------------------------------------------------------------------------------------------


def test_full_size_reads_features_of_natural_images():
    for world in ("tworoom", "pusht", "reacher", "cube"):
        settings = preset(world, "dino_wm").method
        assert isinstance(settings, DinoWMConfig)
        assert settings.features == "efficientnet-lite0"
        assert settings.predictor == PredictorConfig(6, 16, 64, 2048, 0.1)
        assert settings.action_dim == PRESETS[world].action_dim
        assert settings.rows()["features"] == "efficientnet-lite0"


def test_without_features_it_says_that_it_looks_at_pixels():
    assert preset("debug", "dino_wm").method.rows()["features"].startswith("none: 4 patches of 28 px frames")


@pytest.mark.parametrize("kind", ["", "tokens:"])
def test_features_are_tokens_of_about_unit_size(debug_model: LeWM, tmp_path: Path, kind: str):
    """A whole frame's embedding is one token. What divides them is part of the model."""
    with torch.no_grad():
        debug_model.encoder.norm.weight.mul_(7)
        debug_model.projector.out.weight.mul_(50)
    debug_model.save_pretrained(tmp_path / "eyes")
    settings = replace(preset("debug", "dino_wm").method, features=f"{kind}{tmp_path / 'eyes'}")
    assert settings.needs_background
    model = model_of(settings, DataFacts(STATS, background=frames(1)[0]))
    largest = model.see(torch.from_numpy(frames(5))).square().mean(-1).sqrt().max().item()
    assert 0.6 < largest < 1.7
    assert (model.tokens, model.token_width) == ((4, 16) if kind else (1, 8))
    assert math.log2(model.scale.item()) % 1 == 0
    seen = torch.from_numpy(frames(2 * (HISTORY + 1))).unflatten(0, (2, HISTORY + 1))
    batch = Batch(torch.randn(2, HISTORY + 1, 5, 2), features=model.see(seen).squeeze(-2) * model.scale)
    expected = model.predictor(model.see(seen)[:, :-1], model.normalise_actions(batch.actions)[:, :-1])
    error = (expected - model.see(seen)[:, 1:]).square().mean()
    torch.testing.assert_close(model.losses(batch, {}, ALONE).total, error)
    model.save_pretrained(tmp_path / "model")
    assert not any(name.startswith("eyes") for name in model.own_state())
    loaded = lewm.load(tmp_path / "model", device="cpu")
    assert isinstance(loaded, DinoWM)
    torch.testing.assert_close(loaded.see(seen), model.see(seen), rtol=0, atol=0)


def test_it_is_trained_and_evaluated_on_the_tokens_of_another(debug_config: Config, debug_run: Path, tmp_path: Path):
    arguments = ["train", "debug", "--method", "dino_wm", "--method.features", f"tokens:{debug_run}"]
    arguments += ["--data", str(debug_config.data), "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run(arguments) == 0
    assert run(["eval", str(tmp_path / "run"), "--device", "cpu", "--out", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rates"]["policy"]["episodes"] == 2
    model = lewm.load(tmp_path / "run", device="cpu")
    assert isinstance(model, DinoWM)
    assert model.settings.rows()["features"] == f"tokens:{debug_run}"
    assert model.facts.encoder is not None


def test_settings_that_make_no_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"image_size must be a multiple of 14 \(patch\), got 50"):
        DinoWMConfig(image_size=50)
    with pytest.raises(ConfigError, match=r"patch_cells must be a divisor of 14 \(patch\), got 4"):
        DinoWMConfig(patch_cells=4)
