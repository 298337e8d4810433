"""The frozen evaluation pairs: where they come from, and that they stay what they are."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from pathlib import Path

import numpy as np
import pytest

from lewm.envs.registry import make_env
from lewm.errors import ConfigError, EnvError
from lewm.evaluate.manifest import build_manifest, load_manifest

# Changing the pairs changes every published number; this makes it a deliberate act.
TWOROOM_SHA256 = "9108cf81cee5769336c710c8df214d6e2cced7c038edef36a063d69b23f8fb32"


def test_tworooms_pairs_are_frozen():
    resource = importlib.resources.files("lewm.evaluate") / "manifests" / "tworoom.json"
    pairs = json.loads(resource.read_text())["pairs"]
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == TWOROOM_SHA256


def test_tworooms_pairs_make_sense():
    manifest, env = load_manifest("tworoom"), make_env("tworoom", resolution=8)
    assert manifest == load_manifest("lewm/TwoRoom-v0")
    assert manifest.environment == "lewm/TwoRoom-v0"
    assert manifest.goal_offset == 25
    assert [pair.index for pair in manifest.pairs] == list(range(200))
    starts, goals = (np.array([getattr(pair, name) for pair in manifest.pairs]) for name in ("start", "goal"))
    for states in (starts, goals):
        assert len(np.unique(states, axis=0)) == 200
        for state in states:
            env.set_state(state)  # raises where no agent can be
            np.testing.assert_array_equal(env.state, state)
    # 25 steps of at most 5 px along each axis.
    distance = np.abs(goals - starts).max(axis=1)
    assert distance.max() <= 25 * 5
    assert np.median(distance) > 16, "most pairs must not be solved at the start"


def test_rebuilding_gives_the_frozen_pairs(tmp_path: Path):
    frozen = load_manifest("tworoom")
    path = tmp_path / "tworoom.json"
    rebuilt = build_manifest("tworoom", count=5, goal_offset=25, path=path)
    assert rebuilt.environment == frozen.environment
    assert rebuilt.pairs == frozen.pairs[:5]
    written = json.loads(path.read_text())
    assert [tuple(pair["goal"]) for pair in written["pairs"]] == [pair.goal for pair in frozen.pairs[:5]]


def test_the_first_pairs_are_a_prefix():
    manifest = load_manifest("tworoom")
    assert manifest.first(3) == manifest.pairs[:3]
    assert manifest.first(200) == manifest.pairs
    with pytest.raises(ConfigError, match=r"eval\.episodes is 201.*has 200 pairs"):
        manifest.first(201)


def test_an_unknown_environment_has_no_manifest():
    with pytest.raises(EnvError, match="Did you mean 'tworoom'"):
        load_manifest("tworooms")


def test_a_manifest_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.json"
    built = build_manifest("tworoom", count=2, goal_offset=50, path=path)
    assert load_manifest("tworoom", path) == built
    assert built.goal_offset == 50


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "{}",
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2]}]}',
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2], "goal": ["a", 2]}]}',
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2], "goal": 3}]}',
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json is no manifest.*Expected a JSON object"):
        load_manifest("tworoom", path)


def test_a_missing_manifest_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no manifest at .*mine\.json.*build_manifest"):
        load_manifest("tworoom", tmp_path / "mine.json")
