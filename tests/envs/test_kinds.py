"""Kinds of pairs: what tells them apart, without a simulator."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lewm.envs.kinds import CUBE, REACHER
from lewm.envs.registry import env_names, make_env, pair_kinds
from lewm.evaluate.manifest import load_manifest


def counted(env_name: str, key: str, unsolved: bool = False) -> Counter[str | None]:
    """How many of the frozen pairs are of each kind."""
    manifest, kind = load_manifest(env_name), pair_kinds(env_name)[key]
    assert manifest.actions is not None
    pairs = [(np.array(pair.start), np.array(pair.goal)) for pair in manifest.pairs]
    if unsolved:
        with make_env(env_name, resolution=8) as env:
            solved = [bool(env.is_success(*pair)) for pair in pairs]
    else:
        solved = [False] * len(pairs)
    actions = manifest.actions
    return Counter(kind(*pair, a) for pair, a, done in zip(pairs, actions, solved, strict=True) if not done)


def test_the_kinds_of_the_frozen_pairs():
    assert set(pair_kinds("tworoom")) == {"room"}
    assert counted("tworoom", "room") == {"same room": 144, "other room": 56}
    assert counted("pusht", "block") == {"block moves": 167, "block stays": 33}
    assert counted("reacher", "velocity") == {"starts moving": 184, "starts at rest": 16}
    assert counted("reacher", "torques") == {"smooth torques": 111, "rough torques": 89}, "as their whole episodes are"
    held = counted("cube", "grasp", unsolved=True)
    assert held == {
        "held, stays held": 38,
        "held, to be released": 45,
        "free, to be grasped": 48,
        "free, stays free": 14,
    }


@pytest.mark.parametrize("env_name", ["tworoom", "pusht", "reacher", "cube"])
def test_every_world_tells_its_pairs_apart(env_name: str):
    assert env_name in env_names()
    start, goal = (np.array(state) for state in vars(load_manifest(env_name).pairs[0]).values() if state != 0)
    for key, kind in pair_kinds(env_name).items():
        assert (kind(start, goal, None) is None) == (key == "torques"), "torques are not seen in states"


def test_torques_that_are_none_are_of_some_kind():
    assert REACHER["torques"](np.zeros(4), np.zeros(4), np.zeros((25, 2))) == "rough torques"


def test_the_places_in_cubes_state_are_those_of_its_names():
    """Written down a second time, so that its simulator need not be installed."""
    names = make_env("cube", resolution=8).state_names
    state = np.zeros(len(names))
    state[[names.index(name) for name in ("cube_x", "cube_y", "cube_z")]] = 1, 2, 3
    apart = state.copy()
    state[[names.index(name) for name in ("effector_x", "effector_y", "effector_z")]] = 1, 2, 3.02
    state[names.index("gripper_closed")] = 0.4
    assert CUBE["grasp"](state, apart, None) == "held, to be released"
    assert CUBE["grasp"](apart, state, None) == "free, to be grasped"
