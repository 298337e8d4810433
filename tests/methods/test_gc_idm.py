"""GC-IDM: its losses against a literal transcription, and what it makes of the steps that are left."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from walkers import Walkers

from lewm.errors import ConfigError
from lewm.methods.gc_idm import GCIDM, GCIDMConfig
from lewm.model.policy import waves
from lewm.presets import preset
from lewm.types import ALONE, ActionStats, Batch, DataFacts

B, F = 5, 16


def build(**settings: Any) -> GCIDM:
    torch.manual_seed(0)
    config = preset("debug", "gc_idm").method
    assert isinstance(config, GCIDMConfig)
    method = replace(config, **settings).build(DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0))))
    with torch.no_grad():  # its gates start closed
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return method.eval()


@pytest.mark.parametrize("history", [1, 2])
def test_both_terms_are_their_formulas(history: int):
    method, g = build(history=history), torch.Generator().manual_seed(1)
    features, goal = torch.randn(B, history, F, generator=g), torch.randn(B, F, generator=g)
    steps = torch.tensor([1, 7, 0, 23, 50])  # 0: no later frame was left
    batch = Batch(torch.randn(B, history, 5, 2, generator=g), None, features, None, {"goal": goal}, {"goal": steps})
    found = method.losses(batch, {}, ALONE)
    seen, goals = method.see(batch)
    action, log_steps, count = 0.0, 0.0, 0
    for i in range(B):
        block = ((batch.actions[i, -1] - torch.tensor([0.1, -0.2])) / torch.tensor([0.5, 2.0])).flatten()
        for length in range(1, history + 1):
            known = [torch.cat([frame, torch.ones(1)]) for frame in seen[i, -length:]] if history > 1 else [*seen[i]]
            unknown = [torch.zeros(F + 1)] * (history - length)
            question, left = torch.cat([*unknown, *known, goals["goal"][i]]), max(1, steps[i].item())
            told = waves(torch.tensor(float(left)), 64)
            action += (method.head(question, told) - block).square().mean().item()
            log_steps += abs(method.steps_head(question).item() - math.log(left))
            count += 1
    assert found.terms["action"].item() == pytest.approx(action / count, rel=1e-4)
    assert found.terms["steps"].item() == pytest.approx(log_steps / count, rel=1e-4)
    assert found.total.item() == pytest.approx((action + log_steps) / count, rel=1e-4)


def test_the_steps_head_does_not_shape_what_is_seen():
    method = build()
    pixels = torch.randint(0, 256, (B, 1, 28, 28, 3), dtype=torch.uint8)
    batch = Batch(torch.randn(B, 1, 5, 2), pixels, goals={"goal": pixels[:, 0]}, steps={"goal": torch.full((B,), 5)})
    terms = method.losses(batch, {}, ALONE).terms
    eyes = list(method.eyes.parameters())
    assert all(g is None for g in torch.autograd.grad(terms["steps"], eyes, allow_unused=True, retain_graph=True))
    assert any(g is not None for g in torch.autograd.grad(terms["action"], eyes, allow_unused=True))


def test_it_reads_the_steps_off_the_frames_and_knows_what_they_mean(walkers: Walkers):
    """Walkers keep a speed. So the way tells the steps, and steps that are fixed change nothing about the direction."""
    method = build(frame_skip=1, width=64, depth=2, goal_steps=12, dropout=0.0)
    method.facts = DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0)))
    method._stats_of_kind.clear()
    walkers.train(method, 400)
    places = torch.from_numpy(walkers.places).float()
    with torch.no_grad():
        for steps in (1, 4, 8, 12):
            shown, goal = walkers.show(places[:, 5:6]), walkers.show(places[:, 5 + steps])
            seen, goals = method.see(Batch(torch.zeros(len(shown)), features=shown, goals={"goal": goal}))
            question = method.questions([seen], goals["goal"])[:, 0]
            read = method._log_steps(question).exp()
            assert read.median().item() == pytest.approx(steps, rel=0.35)
            way = places[:, 5 + steps] - places[:, 5]
            along = torch.cosine_similarity(method.decide(question), way, dim=-1)
            assert along.median() > 0.9, steps


def test_supposed_steps_replace_those_that_it_reads():
    reads, supposes = build(), build(act_steps=25)
    question = torch.randn(3, reads.question_size)
    assert torch.equal(supposes.decide(question), reads._decide_within(question, torch.full((3,), 25.0)))
    assert not torch.equal(supposes.decide(question), reads.decide(question))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"act_steps": 0}, "method.act_steps must be positive"),
        ({"act_steps": 51}, "method.act_steps must be at most 50 \\(goal_steps\\), which it learns, got 51"),
        ({"steps_width": 7}, "method.steps_width must be even, got 7"),
        ({"dropout": 1.0}, r"method.dropout must be in \[0, 1\)"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        GCIDMConfig(**settings)
