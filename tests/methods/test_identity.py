"""What identifies a model is all that makes it what it is: method, settings, facts, weights, recorded actions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import lewm
from lewm.methods.files import identity
from lewm.methods.lewm import LeWM, LeWMConfig
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts

SETTINGS = preset("debug").method
FACTS = DataFacts(
    actions=ActionStats((0.5, -0.5), (1.0, 2.0)),
    recorded=torch.linspace(0, 1, 24).view(4, 3, 2),
    digest="d" * 64,
    episodes=8,
    environment="lewm/TwoRoom-v0",
)


def model(settings: LeWMConfig = SETTINGS, facts: DataFacts = FACTS, seed: int = 0) -> LeWM:
    torch.manual_seed(seed)
    return LeWM(settings, facts).eval()


def test_it_outlives_files_and_devices_of_the_same_model(tmp_path: Path):
    one = identity(model())
    assert one == identity(model())
    model().save_pretrained(tmp_path, extra={"note": "is about something else"})
    assert identity(lewm.load(tmp_path, "cpu")) == one


def test_it_is_another_ones_if_anything_differs():
    changed = model()
    with torch.no_grad():
        changed.predictor.positions.view(-1)[0] += 1e-6
    assert FACTS.recorded is not None
    others = {
        "a weight": changed,
        "all weights": model(seed=1),
        "settings without a tensor": model(replace(SETTINGS, sigreg=replace(SETTINGS.sigreg, weight=0.1))),
        "statistics": model(facts=replace(FACTS, actions=ActionStats((0.5, -0.5), (1.0, 2.5)))),
        "no statistics": model(facts=replace(FACTS, actions=None)),
        "recorded actions": model(facts=replace(FACTS, recorded=FACTS.recorded + 1)),
        "no recorded actions": model(facts=replace(FACTS, recorded=None)),
        "world": model(facts=replace(FACTS, environment="lewm/PushT-v0")),
        "dataset": model(facts=replace(FACTS, digest="e" * 64)),
    }
    digests = {name: identity(other) for name, other in others.items()}
    assert identity(model()) not in digests.values()
    assert len(set(digests.values())) == len(digests)


def test_statistics_that_learn_nothing_count_as_well():
    """BatchNorm's are no parameters, and change what a model says."""
    changed = model()
    changed.projector.norm.running_var.mul_(1.5)
    assert identity(changed) != identity(model())
