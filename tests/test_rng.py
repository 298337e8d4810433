"""Random streams: those in use keep their numbers, new ones have names, and no two purposes share one by accident."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lewm
from lewm.rng import derive_seed, stream

PACKAGE = Path(lewm.__file__).parent

# Every stream without a name, by the module that asks for it. There will be no more of them: a new purpose gets a name.
IN_USE = Counter(
    [
        "data.collect: stream(seed)",
        "data.collect: stream(seed)",
        "data.generate: stream(seed, index, _DEMONSTRATION)",
        "data.generate: stream(seed, index, _EXPERT)",
        "data.generate: stream(seed, index, _EXPLORATION)",
        "data.generate: stream(seed, index, _MISTAKES)",
        "data.generate: stream(seed, index, _PHASE)",
        "data.generate: derive_seed(seed, index)",
        "data.goals: stream(*key, GOALS, crc32(name.encode()))",
        "data.stats: stream(0)",
        "data.windows: stream(SPLIT_SEED)",
        "data.windows: stream(seed, epoch)",
        "evaluate.manifest: stream(HELD_OUT_SEED, episode, _CUT)",
        "evaluate.policies: stream(self.seed, _RANDOM_POLICY, episode.spec.index, episode.steps)",
        "model.sigreg: derive_seed(seed, step)",
        "plan.policy: derive_seed(self.seed, PLANNING, *place)",
        "train.loop: derive_seed(config.seed, INITIAL_WEIGHTS)",
        "train.loop: derive_seed(config.seed, WINDOWS)",
        "train.trainer: derive_seed(config.seed, DRAWS)",
        "train.trainer: derive_seed(self.config.seed, CALIBRATION)",
        "train.trainer: derive_seed(self.config.seed, DROPOUT, self.step, *process)",
        "train.trainer: derive_seed(self.config.seed, purpose)",
        "understand.decode: stream(settings.seed, WINDOWS)",
        "understand.decoder: derive_seed(self.settings.seed, ORDER)",
        "understand.decoder: derive_seed(settings.seed, INITIAL)",
        "understand.decoder: stream(settings.seed, CHOICE)",
        "understand.imagine: stream(0)",
        "understand.imagine: stream(settings.seed)",
        "understand.monitor_calibration: stream(seed, _SPLIT)",
        "understand.regression: derive_seed(*seed, _ORDER)",
        "understand.regression: derive_seed(*seed, _WEIGHTS)",
        "understand.surprise_findings: stream(seed, _BOOTSTRAP, number)",
        "understand.trajectories: stream(seed, _DIRECTION, episode, number)",
        "understand.trajectories: stream(seed, _START, episode)",
        "understand.views: stream(seed, frames, _THINNED)",
        "understand.views: stream(seed, split, _SPLIT)",
    ]
)
# What the names in them stand for.
PURPOSES = {
    "data.generate": {"_EXPERT": 1, "_PHASE": 3, "_DEMONSTRATION": 4, "_EXPLORATION": 5, "_MISTAKES": 6},
    "data.goals": {"GOALS": 1},
    "data.windows": {"SPLIT_SEED": 3072},
    "evaluate.manifest": {"_CUT": 2},
    "evaluate.policies": {"_RANDOM_POLICY": 2},
    "plan.policy": {"PLANNING": 1},
    "train.trainer": {"INITIAL_WEIGHTS": 0, "DROPOUT": 1, "WINDOWS": 2, "VALIDATION": 3, "DRAWS": 4, "CALIBRATION": 5},
    "understand.decode": {"WINDOWS": 1},
    "understand.decoder": {"INITIAL": 1, "ORDER": 2, "CHOICE": 3},
    "understand.monitor_calibration": {"_SPLIT": 34},
    "understand.regression": {"_WEIGHTS": 1, "_ORDER": 2},
    "understand.surprise_findings": {"_BOOTSTRAP": 33},
    "understand.trajectories": {"_START": 31, "_DIRECTION": 32},
    "understand.views": {"_SPLIT": 1, "_THINNED": 2},
}
# Of keys that the tests name.
FROZEN_SEEDS = (7896617691693857887, 8460147692890830636, 1535930435702422785, 8689535298422960698)
FROZEN_ORDER = [6, 4, 9, 2, 5, 1, 7, 3, 0, 8]
FROZEN_NUMBER = 274073611985187532


def asked_for(module: str, source: str) -> Iterator[tuple[str, bool]]:
    """Every call for a stream in a module's source, and whether its key begins with a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            own = not isinstance(node.func, ast.Attribute) or getattr(node.func.value, "id", "") == "rng"
            if called in ("stream", "derive_seed") and own:
                first = node.args[0] if node.args else None
                has_name = isinstance(first, ast.Constant) and isinstance(first.value, str)
                yield f"{module}: {ast.unparse(node)}", has_name


def all_streams() -> Iterator[tuple[str, bool]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield from asked_for(module, path.read_text(encoding="utf-8"))


def test_streams_without_a_name_are_those_that_were_in_use():
    assert Counter(call for call, has_name in all_streams() if not has_name) == IN_USE


def test_names_are_used_for_one_purpose_each():
    calls = [call.partition(": ")[2] for call, has_name in all_streams() if has_name]
    names = Counter(ast.literal_eval(ast.parse(call).body[0].value.args[0]) for call in calls)  # type: ignore[attr-defined]
    assert [name for name, count in names.items() if count > 1] == []


def test_the_list_would_notice_a_new_stream():
    source = "from lewm import rng\nrng.stream(7)\nstream(seed, 9)\nstream('a.b', seed)\ntorch.cuda.stream(s)"
    expected = [("m: rng.stream(7)", False), ("m: stream(seed, 9)", False), ("m: stream('a.b', seed)", True)]
    assert list(asked_for("m", source)) == expected


@pytest.mark.parametrize("module", PURPOSES)
def test_purposes_keep_their_numbers(module: str):
    found = __import__(f"lewm.{module}", fromlist=["lewm"])
    assert {name: getattr(found, name) for name in PURPOSES[module]} == PURPOSES[module]


def test_streams_in_use_keep_their_numbers():
    """Datasets, weights and results of earlier versions depend on them."""
    assert (derive_seed(0), derive_seed(7), derive_seed(0, 1, 2), derive_seed(2**63 - 1, 5)) == FROZEN_SEEDS
    assert stream(3072).permutation(10).tolist() == FROZEN_ORDER
    assert int(stream(np.int64(5), 2).integers(1 << 60)) == FROZEN_NUMBER


NUMBERS = [(), (0,), (7,), (7, 0), (7, 0, 0), (0, 7), (70,), (1, 2**32 + 7), (7, 1, 1), (2**63 - 1,), (2**32,), (0, 1)]


def test_keys_with_names_never_collide():
    keys = [(name, *numbers) for name in ("a", "a.b", "7", 'a", 7, "', "") for numbers in NUMBERS]
    firsts = [derive_seed(*key) for key in (*keys, (7,), (0, 7), (0, 1, 2))]
    assert len(set(firsts)) == len(firsts)
    assert [stream(*key).integers(1 << 60) for key in keys] == [stream(*key).integers(1 << 60) for key in keys]


def test_without_a_name_they_do():
    """Why there are names."""
    same = [derive_seed(7), derive_seed(7, 0), derive_seed(7, 0, 0)]
    assert len(set(same)) == 1
    assert derive_seed(2**32 + 7) == derive_seed(7, 1)


@pytest.mark.parametrize("key", list(itertools.product(["", "named"], [-1, 1.5, "8", None])))
def test_a_key_has_non_negative_integers(key: tuple[str, object]):
    name, number = key
    with pytest.raises((ValueError, TypeError)):
        stream(*([name] if name else [0]), number)  # type: ignore[arg-type]
